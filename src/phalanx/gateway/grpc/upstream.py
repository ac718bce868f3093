"""The connections to one model server: as many as its own bound on streams makes necessary."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass

from phalanx.gateway.http2.connection import Connection, Role
from phalanx.gateway.http2.frames import ErrorCode, StreamFault
from phalanx.gateway.http2.header_blocks import Headers
from phalanx.gateway.http2.limits import Http2Limits
from phalanx.gateway.http2.read_buffer import ReadBuffer
from phalanx.gateway.http2.stream import Stream, StreamEvents
from phalanx.routing.endpoint import Endpoint


class NotConnectedError(Exception):
    """There is no connection to the server, so that nothing was sent to it.

    Says why and not where: callers get to read it, and addresses are for operators.
    """


@dataclass(frozen=True)
class Connecting:
    """How connections are made, and what they are read into."""

    role: Role
    limits: Http2Limits
    timeout_s: float
    reading: ReadBuffer


class Upstream:
    """`ready`, else `connected`, then `leave` or `close`. Belongs to one event loop."""

    def __init__(self, endpoint: Endpoint, head: bytes, how: Connecting) -> None:
        """`head` begins the header block of each request."""
        self.head = head
        self._endpoint = endpoint
        self._how = how
        self._links: list[_Link] = []
        self._opening: asyncio.Task[None] | None = None
        self._left = False

    def ready(self) -> Connection | None:
        """A connection that takes a call, if there is one."""
        return next((each.connection for each in self._links if each.connection.can_open), None)

    async def connected(self) -> Connection:
        """A connection that takes a call. All who wait for one wait for the same.

        Raises `NotConnectedError`, also to those who still wait when it is left.
        """
        while (connection := self.ready()) is None:
            if self._opening is None:
                self._opening = asyncio.create_task(self._open())
                self._opening.add_done_callback(self._opened)
            await asyncio.shield(self._opening)
        return connection

    def leave(self) -> None:
        """Take no more calls; those that run end."""
        self._left = True
        for link in list(self._links):
            link.connection.leave()

    async def close(self) -> None:
        """End the calls that run."""
        self._left = True
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait((self._opening,))
        for link in list(self._links):
            link.connection.abort()

    def gone(self, link: _Link) -> None:
        """It takes no more calls."""
        if link in self._links:
            self._links.remove(link)

    async def _open(self) -> None:
        link = _Link(self)
        link.connection = Connection(self._how.role, self._how.limits, link, self._how.reading)
        loop, endpoint = asyncio.get_running_loop(), self._endpoint
        try:
            async with asyncio.timeout(self._how.timeout_s):
                await loop.create_connection(lambda: link.connection, endpoint.host, endpoint.port)
                await link.readied
        except BaseException as error:
            link.give_up()
            if isinstance(error, TimeoutError):
                words = f"it took no connection within {self._how.timeout_s:g} s"
                raise NotConnectedError(words) from None
            if isinstance(error, (socket.gaierror, UnicodeError)):
                raise NotConnectedError("its host name is not known") from None
            if isinstance(error, OSError):
                raise NotConnectedError("it refuses connections") from None
            raise
        if self._left or not link.connection.can_open:
            link.connection.leave()
            raise NotConnectedError("it takes no requests")
        self._links.append(link)

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._opening = None
        if not task.cancelled():
            task.exception()  # whoever waited for it was told


class _Link:
    """Owns one connection for an `Upstream`."""

    connection: Connection

    def __init__(self, upstream: Upstream) -> None:
        self.readied: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._upstream = upstream
        self._made = False

    def give_up(self) -> None:
        if self._made:
            self.connection.abort()
        if self.readied.done() and not self.readied.cancelled():
            self.readied.exception()

    # What the connection calls.

    def made(self, transport: asyncio.Transport) -> None:
        self._made = True

    def ready(self) -> None:
        if not self.readied.done():
            self.readied.set_result(None)

    def request(self, stream: Stream, headers: Headers) -> StreamEvents:
        raise StreamFault(ErrorCode.REFUSED_STREAM, "servers open no streams")

    def leaving(self) -> None:
        self._upstream.gone(self)

    def lost(self, words: str) -> None:
        self._upstream.gone(self)
        if not self.readied.done():
            self.readied.set_exception(ConnectionResetError(words))
