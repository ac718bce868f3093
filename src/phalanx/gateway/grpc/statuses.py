"""The one table from what went wrong to the gRPC status that says so."""

from __future__ import annotations

from typing import NamedTuple

from grpc import StatusCode

from phalanx.errors import (
    BodyTooLargeError,
    EngineUnavailableError,
    InvalidInputError,
    NoServerError,
    PhalanxError,
    UnknownModelError,
)
from phalanx.gateway.grpc.metadata import Metadata
from phalanx.gateway.inference import UpstreamError
from phalanx.wire.robot_inference import NOT_STARTED

RETRY_AFTER = "retry-after"
"""Trailing metadata: seconds after which it is worth sending the request again."""
MAX_DETAIL = 2000
"""Characters of a status, which travels in a header."""


class WrongKeyError(InvalidInputError):
    """The caller does not show the key that the method asks for."""


class TooManyCallsError(EngineUnavailableError):
    """As many calls run as are allowed."""


class UnknownCompressionError(InvalidInputError):
    """The caller's messages are compressed in a way that is not understood."""


class Status(NamedTuple):
    code: StatusCode
    message: str
    metadata: Metadata = ()


_CODES: tuple[tuple[type[PhalanxError], StatusCode], ...] = (
    (WrongKeyError, StatusCode.UNAUTHENTICATED),
    (UnknownCompressionError, StatusCode.UNIMPLEMENTED),
    (UnknownModelError, StatusCode.NOT_FOUND),
    (BodyTooLargeError, StatusCode.RESOURCE_EXHAUSTED),
    (InvalidInputError, StatusCode.INVALID_ARGUMENT),
    (TooManyCallsError, StatusCode.RESOURCE_EXHAUSTED),
    (EngineUnavailableError, StatusCode.UNAVAILABLE),
    (PhalanxError, StatusCode.INTERNAL),
)
"""More specific classes come before their bases."""


def status_of(error: PhalanxError) -> Status:
    """A server's own status as it gave it; else the row for `error`."""
    message = str(error)[:MAX_DETAIL]
    if isinstance(error, UpstreamError):
        return Status(error.code, message, error.metadata)
    code = next(code for kind, code in _CODES if isinstance(error, kind))
    if isinstance(error, NoServerError):
        metadata = ((RETRY_AFTER, str(error.retry_after_s)), (NOT_STARTED, "1"))
        return Status(code, message, metadata)
    return Status(code, message)
