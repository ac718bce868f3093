"""Accepts a WebSocket and runs its handler, in a task that ends with the client's connection."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging

from wsproto.utilities import generate_accept_token

from phalanx.gateway.http.deadline import Deadline
from phalanx.gateway.http.fields import status_line
from phalanx.gateway.http.limits import HttpLimits
from phalanx.gateway.http.message import HttpRequest
from phalanx.gateway.http.router import WebSocketRoute
from phalanx.gateway.http.websocket import WebSocket
from phalanx.gateway.http.work import Caller

logger = logging.getLogger(__name__)


def handshake_fault(request: HttpRequest) -> str:
    """What is wrong with a request to become a WebSocket, or nothing."""
    headers = request.headers
    if request.method != "GET":
        return f"a WebSocket is asked for by GET, not by {request.method}"
    if headers.get("sec-websocket-version") != "13":
        return "sec-websocket-version must be 13"
    try:
        key = base64.b64decode(headers.get("sec-websocket-key"), validate=True)
    except binascii.Error:
        key = b""
    return "" if len(key) == 16 else "sec-websocket-key must be 16 bytes in base64"


class WebSocketWork(asyncio.Protocol):
    """Reads the client's frames in the place of its connection. A client that has not taken what it
    was sent after the limits' `stall_timeout_s` is cut off.
    """

    def __init__(
        self, caller: Caller, route: WebSocketRoute, request: HttpRequest, limits: HttpLimits
    ) -> None:
        self._caller = caller
        self._route = route
        self._request = request
        self._socket = WebSocket(caller.transport, limits.max_body_bytes)
        self._stall_timeout_s = limits.stall_timeout_s
        self._deadline = Deadline(asyncio.get_running_loop(), self.cancel)
        self._task: asyncio.Task[None] | None = None

    @property
    def begun(self) -> bool:
        return True

    def start(self) -> None:
        """Accept: `handshake_fault` has found nothing."""
        request = self._request
        token = generate_accept_token(request.headers.get("sec-websocket-key").encode())
        head = (
            status_line(101),
            b"connection: Upgrade\r\nupgrade: websocket\r\n",
            b"sec-websocket-accept: ",
            token,
            b"\r\nx-request-id: ",
            request.request_id.encode(),
            b"\r\n\r\n",
        )
        transport = self._caller.transport
        transport.write(b"".join(head))
        early = self._caller.switch()
        transport.set_protocol(self)
        transport.resume_reading()
        if early:
            self._socket.feed(early)
        self._task = asyncio.ensure_future(self._handle())
        self._task.add_done_callback(self._done)

    def arrived(self) -> None:
        """It had no body."""

    def cancel(self) -> None:
        self._request.disconnected.set()
        self._socket.lost()
        if self._task is not None:
            self._task.cancel()
        self._caller.transport.abort()

    def leave(self) -> None:
        self._socket.leave()

    def pause_response(self) -> None:
        self.pause_writing()

    def resume_response(self) -> None:
        self.resume_writing()

    # asyncio.Protocol

    def data_received(self, data: bytes) -> None:
        self._socket.feed(data)

    def pause_writing(self) -> None:
        self._socket.pause_writing()
        self._deadline.set(self._stall_timeout_s)

    def resume_writing(self) -> None:
        self._socket.resume_writing()
        if self._task is not None:
            self._deadline.clear()

    def connection_lost(self, error: Exception | None) -> None:
        self._deadline.close()
        self._request.disconnected.set()
        self._socket.lost()
        if self._task is not None:
            self._task.cancel()
        self._caller.ended()

    async def _handle(self) -> None:
        await self._route.handler(self._request, self._socket)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not self._request.disconnected.is_set():
            self._deadline.set(self._stall_timeout_s)  # for what was sent last
        error = None if task.cancelled() else task.exception()
        if error is None or isinstance(error, ConnectionResetError):
            code = 1001 if self._socket.leaving else 1000
            self._socket.end(code)
            return
        rid = self._request.request_id
        logger.error("WebSocket %s failed", self._request.path, exc_info=error, extra={"rid": rid})
        self._socket.end(1011, "the gateway failed; see its log")
