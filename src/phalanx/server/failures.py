"""The one table from what went wrong to the HTTP status that says so."""

from __future__ import annotations

from typing import NamedTuple

from phalanx.errors import (
    BodyTooLargeError,
    DeviceMemoryError,
    EngineAsleepError,
    EngineOverloadedError,
    EngineUnavailableError,
    InvalidInputError,
    MalformedRequestError,
    MissingDependencyError,
    PhalanxError,
    RequestFailedError,
    StreamStalledError,
    UnknownModelError,
    WeightUpdateError,
)


class Failure(NamedTuple):
    """`retryable`: the request never started and may be sent again, here or elsewhere."""

    status: int
    code: str
    retryable: bool = False


_TABLE: tuple[tuple[type[PhalanxError], Failure], ...] = (
    (MalformedRequestError, Failure(400, "malformed_request")),
    (BodyTooLargeError, Failure(413, "body_too_large")),
    (UnknownModelError, Failure(404, "model_not_found")),
    (InvalidInputError, Failure(400, "invalid_request")),
    (MissingDependencyError, Failure(501, "missing_dependency")),
    (StreamStalledError, Failure(408, "stream_stalled")),
    (DeviceMemoryError, Failure(507, "out_of_memory")),
    (RequestFailedError, Failure(500, "request_failed")),
    (WeightUpdateError, Failure(400, "weight_update_failed")),
    (EngineAsleepError, Failure(503, "asleep", retryable=True)),
    (EngineOverloadedError, Failure(503, "overloaded", retryable=True)),
    (EngineUnavailableError, Failure(503, "unavailable", retryable=True)),
    (PhalanxError, Failure(500, "internal_error")),
)
"""More specific classes come before their bases."""


def failure_of(error: PhalanxError) -> Failure:
    """The row for `error`."""
    return next(failure for kind, failure in _TABLE if isinstance(error, kind))
