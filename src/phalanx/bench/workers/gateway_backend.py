"""A backend of the gateway benchmark: answers by path, after a delay where one is set."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from typing import cast

from gateway_traffic import (  # type: ignore[import-not-found]
    ACTION_BYTES,
    NUM_EVENTS,
    PATHS,
    ROLE,
    answer_frame,
)


def _response(content_type: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\nserver: backend\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


_ANSWERS = {
    PATHS["json"].encode(): _response(
        "application/json", json.dumps({"id": "1", "text": "y" * 1080}).encode()
    ),
    b"/health": _response("application/json", b"{}"),
    PATHS["binary"].encode(): _response("application/octet-stream", bytes(ACTION_BYTES)),
}
_ROLE = f"/{ROLE}".encode()
"""What a proxy leaves in front of a path that knows nothing of roles."""
_STREAMS = (PATHS["sse"].encode(), PATHS["role-sse"].encode())
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nserver: backend\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_EVENT = b"data: " + json.dumps({"id": "1", "delta": "z" * 60}).encode() + b"\n\n"
_CHUNK = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
_DONE = b"data: [DONE]\n\n"
_END = b"%x\r\n%b\r\n0\r\n\r\n" % (len(_DONE), _DONE)
_SWITCH = (
    b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-accept: %b\r\n\r\n"
)
_WEBSOCKET = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""RFC 6455: what a server adds to the client's key."""
_FRAME = answer_frame()


class Backend:
    """`num_requests` counts since it was last set."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.num_requests = 0

    async def listen(self) -> int:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port


class _Connection(asyncio.Protocol):
    """Reads requests that have a length, or frames after a change to WebSocket."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._loop = asyncio.get_running_loop()
        self._head = b""
        self._missing = 0
        self._path = b""
        self._frames = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._frames:
            self._frame(data)
            return
        if self._missing:
            self._missing -= len(data)
        else:
            data = self._head + data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._head = data
                return
            self._head = b""
            head = data[:end].lower()
            self._path = data.split(b" ", 2)[1].removeprefix(_ROLE)
            if b"upgrade: websocket" in head:
                self._frames = True
                self._transport.write(_SWITCH % _accept(data[:end]))
                return
            length = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0] or b"0")
            self._missing = length - (len(data) - end - 4)
        if self._missing <= 0:
            self._missing = 0
            self._answer()

    def _answer(self) -> None:
        self._backend.num_requests += 1
        if self._backend.delay_s:
            self._loop.call_later(self._backend.delay_s, self._write, self._path)
        else:
            self._write(self._path)

    def _write(self, path: bytes) -> None:
        if self._transport.is_closing():
            return
        if path in _STREAMS:
            self._transport.write(_STREAM_HEAD)
            self._loop.call_soon(self._event, NUM_EVENTS - 1)
        else:
            answer = _ANSWERS.get(path)
            self._transport.write(answer or b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n")

    def _event(self, left: int) -> None:
        """One event an iteration of the loop, so that each is sent on its own."""
        if self._transport.is_closing():
            return
        if left:
            self._transport.write(_CHUNK)
            self._loop.call_soon(self._event, left - 1)
        else:
            self._transport.write(_END)

    def _frame(self, data: bytes) -> None:
        if not self._missing:
            self._head += data
            if len(self._head) < 14:
                return
            data, self._head = self._head, b""
            self._missing = int.from_bytes(data[2:10], "big") + 14
        self._missing -= len(data)
        if self._missing == 0:
            self._transport.write(_FRAME)


def _accept(head: bytes) -> bytes:
    lines = (line.partition(b":") for line in head.split(b"\r\n"))
    keys = [value.strip() for name, _, value in lines if name.lower() == b"sec-websocket-key"]
    return base64.b64encode(hashlib.sha1(keys[0] + _WEBSOCKET).digest())
