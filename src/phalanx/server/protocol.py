"""The HTTP protocol of accepted connections: uvicorn's, which also lets a request's handler drop
its connection at once, without waiting for a reader that does not read."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from phalanx.server.event_stream import ABORT_EXTENSION


class AbortableProtocol(HttpToolsProtocol):
    """Puts `transport.abort` among the extensions of each request's scope."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT_EXTENSION: self.transport.abort}  # type: ignore[dict-item]
