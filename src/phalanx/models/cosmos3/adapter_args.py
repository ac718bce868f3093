"""`adapter.args` of a server's file, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from phalanx.errors import ConfigurationError, InvalidRequestError

S = TypeVar("S", bound=msgspec.Struct)


def adapter_args(given: Mapping[str, object], kind: type[S]) -> S:
    """Raises `ConfigurationError` naming the key that is unknown, missing or of a wrong type or
    value.
    """
    try:
        return msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigurationError):
            raise error.__cause__ from None
        known = ", ".join(kind.__struct_fields__)
        raise ConfigurationError(f"adapter.args: {error}; known: {known}") from error


@contextmanager
def checked_as_requests() -> Iterator[None]:
    """What no request could have is a mistake of the server's file here."""
    try:
        yield
    except InvalidRequestError as error:
        raise ConfigurationError(f"adapter.args: {error}") from error
