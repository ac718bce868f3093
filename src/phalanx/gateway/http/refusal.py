"""How the gateway words what it will not do, before an answer has begun or inside a stream."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from phalanx.errors import (
    BodyTooLargeError,
    DeadlineExceededError,
    EngineUnavailableError,
    InvalidInputError,
    MalformedRequestError,
    NoServerError,
    PhalanxError,
    UnknownModelError,
)
from phalanx.gateway.http.message import JSON, Headers, HttpResponse
from phalanx.wire import sglang
from phalanx.wire.openai.errors import error_body
from phalanx.wire.sse import DONE, data_line, named_event

GENERATE = "/generate"
_STATUSES: tuple[tuple[type[PhalanxError], int, str], ...] = (
    (UnknownModelError, 404, "model_not_found"),
    (MalformedRequestError, 400, "malformed_request"),
    (BodyTooLargeError, 413, "body_too_large"),
    (InvalidInputError, 400, "invalid_request"),
    (DeadlineExceededError, 504, "timeout"),
    (EngineUnavailableError, 503, "unavailable"),
    (PhalanxError, 500, "internal_error"),
)
"""More specific classes come before their bases."""
_OPENAI_BEGINS = ("/v1/", GENERATE)
_OPENAI_ENDS = ("/chat/completions", GENERATE)
"""Paths of the gateway's own, and of a role's. Streams under all of these end with `[DONE]`."""


@dataclass(frozen=True)
class Refusal:
    """`retry_after_s` above 0 says that the request never started and may be sent again.

    `fields` are further lines of the head, each with a line's end in front of it; `body` is the
    JSON of it where that says more than code and message.
    """

    status: int
    code: str
    message: str
    retry_after_s: int = 0
    allowed: tuple[str, ...] = ()
    fields: bytes = b""
    body: bytes = b""

    def response(self, path: str) -> HttpResponse:
        """As a whole response, in the words of the protocol that `path` belongs to."""
        fields = {"content-type": JSON}
        if self.retry_after_s > 0:
            fields["retry-after"] = str(self.retry_after_s)
        if self.status == 401:
            fields["www-authenticate"] = "Bearer"
        if self.allowed:
            fields["allow"] = ", ".join(self.allowed)
        for line in self.fields.decode("latin-1").split("\r\n")[1:]:
            name, _, value = line.partition(": ")
            fields[name] = value
        return HttpResponse(self.status, self.body or self._body(path), Headers.of(fields))

    def stream_end(self, path: str) -> bytes:
        """The events that end a stream which had begun."""
        if path.endswith(GENERATE):
            return sglang.stream_error_line(self.message, self.status, retryable=False) + DONE
        body = self._body(path)
        if _is_openai(path):
            return data_line(body) + DONE
        return named_event("error", body)

    def _body(self, path: str) -> bytes:
        # SGLang's own errors have OpenAI's form with less in it.
        if _is_openai(path):
            return error_body(self.message, self.status, code=self.code)
        return msgspec.json.encode({"error": {"code": self.code, "message": self.message}})


def refusal_of(error: PhalanxError) -> Refusal:
    """The HTTP words of what kept a request from being sent on."""
    if isinstance(error, NoServerError):
        return Refusal(503, "no_server", str(error), retry_after_s=error.retry_after_s)
    status, code = next(row[1:] for row in _STATUSES if isinstance(error, row[0]))
    return Refusal(status, code, str(error), retry_after_s=1 if status == 503 else 0)


def _is_openai(path: str) -> bool:
    return path.startswith(_OPENAI_BEGINS) or path.endswith(_OPENAI_ENDS)
