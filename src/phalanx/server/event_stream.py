"""A stream of server-sent events that follows its reader's pace.

Each event is written by itself, and the next one is not produced before the connection has taken
it. A reader that takes nothing for the write time-out loses its connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from phalanx.errors import PhalanxError
from phalanx.server.connection import disconnected, while_connected

logger = logging.getLogger(__name__)
ABORT_EXTENSION = "phalanx.abort_connection"
"""Key of the scope's extension that drops the connection at once."""


class EventStream(Response):
    """`first` is known before the status is chosen; `render_error` ends a stream that breaks."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        rest: AsyncGenerator[bytes],
        *,
        render_error: Callable[[PhalanxError], bytes],
        write_timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers(
            {"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})}
        )
        self._first = first
        self._rest = rest
        self._render_error = render_error
        self._write_timeout_s = write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": [pair for pair in self.raw_headers if pair[0] != b"content-length"],
        }
        await send(start)
        try:
            await while_connected(receive, self._write(send))
        except ClientDisconnect:
            logger.info("the client left its stream")
        except TimeoutError:
            logger.warning(
                "the client took nothing for %.1f s; its connection is dropped",
                self._write_timeout_s,
            )
            abort: Callable[[], None] | None = scope.get("extensions", {}).get(ABORT_EXTENSION)
            if abort is not None:
                abort()
                await disconnected(receive)
        finally:
            await self._rest.aclose()

    async def _write(self, send: Send) -> None:
        await self._put(send, self._first)
        try:
            async for chunk in self._rest:
                await self._put(send, chunk)
        except PhalanxError as error:
            logger.warning("a stream breaks off: %s", error)
            await self._put(send, self._render_error(error))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _put(self, send: Send, chunk: bytes) -> None:
        if chunk:
            async with asyncio.timeout(self._write_timeout_s):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
