"""A gRPC status that ended a call, as the exception of this package that says the same."""

from __future__ import annotations

from collections.abc import Mapping

import grpc
import grpc.aio

from phalanx.errors import (
    ConfigurationError,
    DeadlineExceededError,
    EngineOverloadedError,
    EngineUnavailableError,
    InvalidRequestError,
    NoServerError,
    PhalanxError,
    RequestFailedError,
    UnknownModelError,
)
from phalanx.wire.robot_inference import NOT_STARTED

RETRY_AFTER = "retry-after"

_CLASSES: Mapping[grpc.StatusCode, type[PhalanxError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: UnknownModelError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.UNAVAILABLE: EngineUnavailableError,
    grpc.StatusCode.UNAUTHENTICATED: ConfigurationError,
    grpc.StatusCode.PERMISSION_DENIED: ConfigurationError,
    grpc.StatusCode.UNIMPLEMENTED: ConfigurationError,
}
_HINTS: Mapping[grpc.StatusCode, str] = {
    grpc.StatusCode.UNAUTHENTICATED: "give the key as api_key",
    grpc.StatusCode.PERMISSION_DENIED: "give another key as api_key",
    grpc.StatusCode.UNIMPLEMENTED: "it does not speak robot.inference.v1; give the address of a "
    "gateway or policy server",
}

_SPEAKS_HTTP = "http1.x server"
"""In gRPC's words for a connection to one."""


def failure_of(error: grpc.aio.AioRpcError, address: str) -> PhalanxError:
    """What to raise for `error`, which a call to `address` ended with."""
    code = error.code()
    if code is grpc.StatusCode.UNAVAILABLE and _SPEAKS_HTTP in (error.details() or ""):
        return ConfigurationError(
            f"{address}: an HTTP server listens there; give the address for gRPC, which is"
            " --gateway of a gateway, and server.port of a policy server"
        )
    message = f"{address}: {error.details() or code.name}"
    if code in _HINTS:
        message += f"; {_HINTS[code]}"
    # In earlier versions of gRPC metadata iterates as pairs, and is a mapping of something else.
    metadata = dict(tuple(error.trailing_metadata() or ()))
    if metadata.get(NOT_STARTED) == "1":
        return _not_started(code, message, str(metadata.get(RETRY_AFTER, "")))
    kind = _CLASSES.get(code)
    if kind is None:
        return RequestFailedError(f"{message} ({code.name})")
    return kind(message)


def _not_started(code: grpc.StatusCode, message: str, retry_after: str) -> PhalanxError:
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return EngineOverloadedError(message)
    seconds = int(retry_after) if retry_after.isascii() and retry_after.isdecimal() else 1
    return NoServerError(message, retry_after_s=seconds)
