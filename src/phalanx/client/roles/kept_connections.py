"""Connections to servers, kept for a moment after a request and found again at once.

A client may have thousands of requests at a time. Taking and returning a connection costs the same
however many there are, which is not so in httpx's own pool; and only so many connect to a server at a
time that none of them takes long for the others' sake.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Iterable

import httpcore

_IDLE_S = 2.0
"""Shorter than servers keep a connection, so that a request rarely meets one that is being closed."""


_NUM_CONNECTING = 64


class KeptConnections:
    """Belongs to one event loop."""

    def __init__(self, tls: ssl.SSLContext) -> None:
        self._tls = tls
        self._network = _TurnsToConnect()
        self._idle: dict[bytes, deque[httpcore.AsyncHTTPConnection]] = {}
        self._in_use: set[httpcore.AsyncHTTPConnection] = set()

    async def take(self, url: httpcore.URL) -> httpcore.AsyncHTTPConnection:
        """One that nobody else uses until it is put back; it connects when a request is sent."""
        key = _key(url)
        kept = self._idle.get(key)
        while kept:
            connection = kept.pop()  # the one that was used last
            if not connection.has_expired():
                break
            await connection.aclose()
        else:
            connection = httpcore.AsyncHTTPConnection(
                origin=url.origin,
                ssl_context=self._tls,
                keepalive_expiry=_IDLE_S,
                network_backend=self._network,
            )
        self._in_use.add(connection)
        return connection

    async def put_back(self, url: httpcore.URL, connection: httpcore.AsyncHTTPConnection) -> None:
        """Its request has ended, however that was. Twice is once."""
        if connection not in self._in_use:
            return
        self._in_use.discard(connection)
        if not connection.is_idle() or connection.is_closed():
            await connection.aclose()
            return
        kept = self._idle.setdefault(_key(url), deque())
        kept.append(connection)
        while kept[0].has_expired():
            expired = kept.popleft()
            await expired.aclose()
            if not kept:
                break

    async def close(self) -> None:
        """Those in use, too."""
        idle, self._idle = self._idle, {}
        in_use, self._in_use = self._in_use, set()
        for connection in (*in_use, *(each for kept in idle.values() for each in kept)):
            await connection.aclose()


class _TurnsToConnect(httpcore.AnyIOBackend):
    """The time that a connection may take begins with its turn."""

    def __init__(self) -> None:
        super().__init__()
        self._turns: dict[tuple[str, int], asyncio.Semaphore] = {}

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 (whose method this is)
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        turns = self._turns.setdefault((host, port), asyncio.Semaphore(_NUM_CONNECTING))
        async with turns:
            return await super().connect_tcp(host, port, timeout, local_address, socket_options)


def _key(url: httpcore.URL) -> bytes:
    return b"%b://%b:%d" % (url.scheme, url.host, url.origin.port)
