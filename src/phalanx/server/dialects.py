"""How each protocol words a failure: before its answer has begun, and inside a stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from starlette.responses import Response

from phalanx.errors import (
    BodyTooLargeError,
    InvalidRequestError,
    MalformedRequestError,
    PhalanxError,
)
from phalanx.server.failures import Failure, failure_of
from phalanx.server.http_body import LingeringResponse
from phalanx.wire import actions, openai, sglang
from phalanx.wire.sglang.weights import result_body
from phalanx.wire.sse import DONE


class Dialect(Protocol):
    """One protocol's words."""

    def body(self, error: PhalanxError, failure: Failure) -> bytes: ...

    def stream_error(self, error: PhalanxError) -> bytes: ...

    def refusal(self, message: str, status: int, code: str) -> bytes:
        """The body for a request that the server itself turns away."""
        ...


class SGLangDialect:
    """The native routes."""

    def body(self, error: PhalanxError, failure: Failure) -> bytes:
        if isinstance(error, (MalformedRequestError, BodyTooLargeError)):
            return sglang.refusal_body(str(error), failure.status, _field(error))
        return sglang.failure_body(str(error), _field(error))

    def stream_error(self, error: PhalanxError) -> bytes:
        # A part of the answer is with the client: sent again, the request would answer twice.
        line = sglang.stream_error_line(str(error), failure_of(error).status, retryable=False)
        return line + DONE

    def refusal(self, message: str, status: int, code: str) -> bytes:
        return sglang.refusal_body(message, status)


class WeightsDialect(SGLangDialect):
    """The routes for weights, which say that they did not succeed where nothing has changed."""

    def body(self, error: PhalanxError, failure: Failure) -> bytes:
        if failure.status >= 500:
            return super().body(error, failure)
        return result_body(str(error), success=False)


class OpenAIDialect:
    """The routes under `/v1`."""

    def body(self, error: PhalanxError, failure: Failure) -> bytes:
        return openai.error_body(str(error), failure.status, param=_field(error), code=failure.code)

    def stream_error(self, error: PhalanxError) -> bytes:
        return openai.stream_error_line(str(error), failure_of(error).status) + DONE

    def refusal(self, message: str, status: int, code: str) -> bytes:
        return openai.error_body(message, status, code=code)


class ActionsDialect:
    """`POST /v1/actions/generations`, which does not stream."""

    def body(self, error: PhalanxError, failure: Failure) -> bytes:
        return actions.error_body(failure.code, str(error))

    def stream_error(self, error: PhalanxError) -> bytes:
        return self.body(error, failure_of(error))

    def refusal(self, message: str, status: int, code: str) -> bytes:
        return actions.error_body(code, message)


SGLANG: Dialect = SGLangDialect()
WEIGHTS: Dialect = WeightsDialect()
OPENAI: Dialect = OpenAIDialect()
ACTIONS: Dialect = ActionsDialect()


def _field(error: PhalanxError) -> str | None:
    return (error.field or None) if isinstance(error, InvalidRequestError) else None


def dialect_of(path: str) -> Dialect:
    """The protocol that a path belongs to."""
    if path.startswith("/v1/actions/"):
        return ACTIONS
    return OPENAI if path.startswith("/v1/") else SGLANG


@dataclass(frozen=True)
class Refusals:
    """Builds the responses for failures; `retry_after_s` is told where trying again may help."""

    retry_after_s: int

    def of(self, error: PhalanxError, dialect: Dialect) -> Response:
        failure = failure_of(error)
        kind = LingeringResponse if isinstance(error, BodyTooLargeError) else Response
        return kind(
            dialect.body(error, failure),
            failure.status,
            self._headers(failure.retryable),
            "application/json",
        )

    def turned_away(self, path: str, message: str, status: int, code: str) -> Response:
        body = dialect_of(path).refusal(message, status, code)
        headers = {"www-authenticate": "Bearer"} if status == 401 else self._headers(status == 503)
        return Response(body, status, headers, "application/json")

    def _headers(self, retryable: bool) -> dict[str, str]:
        return {"retry-after": str(self.retry_after_s)} if retryable else {}
