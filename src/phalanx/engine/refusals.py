"""Errors in which an operation may end while the engine goes on, and how they cross processes."""

from __future__ import annotations

import msgspec

from phalanx.errors import (
    DeviceMemoryError,
    InvalidRequestError,
    RequestFailedError,
    WeightUpdateError,
)

REFUSALS = (InvalidRequestError, WeightUpdateError, DeviceMemoryError, RequestFailedError)
"""More specific classes come before their bases."""


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """One of `REFUSALS`: the place of its class among them, its message, the field at fault."""

    kind: int
    message: str
    field: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Refusal | None:
        """None for any other error."""
        for kind, each in enumerate(REFUSALS):
            if isinstance(error, each):
                field = error.field if isinstance(error, InvalidRequestError) else ""
                return cls(kind, str(error), field)
        return None

    def error(self) -> Exception:
        """The error, anew."""
        if REFUSALS[self.kind] is InvalidRequestError:
            return InvalidRequestError(self.message, field=self.field)
        return REFUSALS[self.kind](self.message)
