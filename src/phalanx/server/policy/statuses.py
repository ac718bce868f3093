"""The one table from what went wrong to the gRPC status that says so."""

from __future__ import annotations

from typing import NamedTuple

from grpc import StatusCode

from phalanx.errors import (
    BodyTooLargeError,
    EngineAsleepError,
    EngineOverloadedError,
    EngineUnavailableError,
    InvalidInputError,
    PhalanxError,
    UnknownModelError,
)
from phalanx.server.policy.failures import (
    AnswerMismatchError,
    NotReadyError,
    OutOfMemoryError,
    PolicyFailedError,
    RequestAbortedError,
    UnauthenticatedError,
)
from phalanx.wire.robot_inference import NOT_STARTED

REFUSAL = ((NOT_STARTED, "1"),)
"""Trailing metadata of a refusal: the request never started and may be sent to another server."""


class Status(NamedTuple):
    """`not_started`: the request never reached the policy."""

    code: StatusCode
    not_started: bool = False


_TABLE: tuple[tuple[type[PhalanxError], Status], ...] = (
    (UnauthenticatedError, Status(StatusCode.UNAUTHENTICATED)),
    (UnknownModelError, Status(StatusCode.NOT_FOUND)),
    (BodyTooLargeError, Status(StatusCode.RESOURCE_EXHAUSTED)),
    (InvalidInputError, Status(StatusCode.INVALID_ARGUMENT)),
    (NotReadyError, Status(StatusCode.UNAVAILABLE, not_started=True)),
    (EngineOverloadedError, Status(StatusCode.RESOURCE_EXHAUSTED, not_started=True)),
    (EngineAsleepError, Status(StatusCode.UNAVAILABLE, not_started=True)),
    (EngineUnavailableError, Status(StatusCode.UNAVAILABLE)),
    (RequestAbortedError, Status(StatusCode.CANCELLED)),
    (OutOfMemoryError, Status(StatusCode.RESOURCE_EXHAUSTED)),
    (AnswerMismatchError, Status(StatusCode.DATA_LOSS)),
    (PolicyFailedError, Status(StatusCode.INTERNAL)),
    (PhalanxError, Status(StatusCode.INTERNAL)),
)
"""More specific classes come before their bases."""


def status_of(error: PhalanxError) -> Status:
    """The row for `error`."""
    return next(status for kind, status in _TABLE if isinstance(error, kind))
