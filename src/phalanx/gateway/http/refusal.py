"""How the gateway words what it will not do, before an answer has begun or inside a stream."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from phalanx.gateway.http.message import JSON, Headers, HttpResponse
from phalanx.wire.openai.errors import error_body
from phalanx.wire.sse import DONE, data_line, named_event

DONE_PATHS = ("/v1/", "/generate")
"""Streams under these end with `[DONE]`."""


@dataclass(frozen=True)
class Refusal:
    """`retry_after_s` above 0 says that the request never started and may be sent again."""

    status: int
    code: str
    message: str
    retry_after_s: int = 0
    allowed: tuple[str, ...] = ()

    def response(self, path: str) -> HttpResponse:
        """As a whole response, in the words of the protocol that `path` belongs to."""
        fields = {"content-type": JSON}
        if self.retry_after_s > 0:
            fields["retry-after"] = str(self.retry_after_s)
        if self.status == 401:
            fields["www-authenticate"] = "Bearer"
        if self.allowed:
            fields["allow"] = ", ".join(self.allowed)
        return HttpResponse(self.status, self._body(path), Headers.of(fields))

    def stream_end(self, path: str) -> bytes:
        """The events that end a stream which had begun."""
        body = self._body(path)
        if path.startswith(DONE_PATHS):
            return data_line(body) + DONE
        return named_event("error", body)

    def _body(self, path: str) -> bytes:
        if path.startswith(DONE_PATHS):
            return error_body(self.message, self.status, code=self.code)
        return msgspec.json.encode({"error": {"code": self.code, "message": self.message}})
