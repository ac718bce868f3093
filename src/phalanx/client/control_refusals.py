"""What a control process's refusal means, as the exception of this package that says the same."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from phalanx.errors import (
    ConfigurationError,
    EngineUnavailableError,
    PhalanxError,
    RequestFailedError,
    RoleOperationFailedError,
    RoleOperationRefusedError,
)


class TryAgainError(RoleOperationRefusedError):
    """Another operation is under way."""


_CLASSES: Mapping[str, type[PhalanxError]] = {
    "unauthorized": ConfigurationError,
    "forbidden": ConfigurationError,
    "invalid_request": ConfigurationError,
    "not_json": ConfigurationError,
    "not_found": ConfigurationError,
    "http": ConfigurationError,
    "busy": TryAgainError,
    "refused": RoleOperationRefusedError,
    "failed": RoleOperationFailedError,
    "unavailable": EngineUnavailableError,
    "internal": RequestFailedError,
}


class Refusal(msgspec.Struct, frozen=True):
    """`code` is what programs go by, `message` what people do."""

    code: str
    message: str

    @property
    def is_known(self) -> bool:
        """Whether it is one of a control process's."""
        return self.code in _CLASSES

    def error(self, hint: str = "") -> PhalanxError:
        """With a `hint` of what to do, where the caller has one."""
        kind = _CLASSES.get(self.code, RequestFailedError)
        return kind(f"{self.message}; {hint}" if hint else self.message)


class _Body(msgspec.Struct, frozen=True):
    error: Refusal


def refusal_in(body: bytes) -> Refusal | None:
    """None for a body that no control process sends."""
    try:
        return msgspec.json.decode(body, type=_Body).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
