"""Reads request bodies up to a limit, and refuses larger ones without reading them whole."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from phalanx.errors import BodyTooLargeError

LINGER_BYTES = 64 * 1024 * 1024
LINGER_S = 5.0


async def read_body(request: Request, max_bytes: int, key: str = "max_request_bytes") -> bytes:
    """The body. Raises `BodyTooLargeError` as soon as it is known to exceed `max_bytes`, which the
    configuration calls `key`."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(f"{declared} bytes", max_bytes, key)
    chunks: list[bytes] = []
    num_bytes = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk: bytes = message.get("body", b"")
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_large(f"more than {max_bytes} bytes", max_bytes, key)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_large(size: str, max_bytes: int, key: str) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body has {size}; at most {key}={max_bytes} are allowed; send less at once"
    )


class LingeringResponse(Response):
    """Answers a request whose body has not been read, then reads on a little.

    Closing at once would reset the connection, and a client still sending would lose the answer.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers["connection"] = "close"
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        try:
            async with asyncio.timeout(LINGER_S):
                await _discard(receive)
        except TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard(receive: Receive) -> None:
    num_bytes = 0
    while num_bytes < LINGER_BYTES:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return
