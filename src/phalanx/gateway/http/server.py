"""The gateway's HTTP server: listens, and knows its connections until the last one has closed."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.clock import Clock, SystemClock
from phalanx.gateway.http.connection import ClientConnection
from phalanx.gateway.http.front import Front, Relaying
from phalanx.gateway.http.keys import Keys
from phalanx.gateway.http.limits import HttpLimits
from phalanx.gateway.http.request_ids import RequestIds
from phalanx.gateway.http.router import Router
from phalanx.gateway.http.statistics import HttpStatistics
from phalanx.gateway.http.whole_message import KnownHeads

BACKLOG = 1024


@dataclass(frozen=True)
class HttpServerConfig:
    """Where to listen (port 0: any free one), whom to let in, and how much of what."""

    host: str = "127.0.0.1"
    port: int = 0
    api_key: str | None = None
    admin_key: str | None = None
    access_log: bool = False
    limits: HttpLimits = field(default_factory=HttpLimits)


class HttpServer:
    """`router` is whole before `start`; `relays` serve the paths that the router relays, each by the
    name that the route gives.
    """

    def __init__(
        self,
        router: Router,
        relays: Mapping[str, Relaying] | None = None,
        *,
        config: HttpServerConfig | None = None,
        tls: ssl.SSLContext | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._config = config = config or HttpServerConfig()
        self._tls = tls
        self.statistics = HttpStatistics()
        self._relays = {} if relays is None else relays
        self._front = Front(
            router=router,
            relays=self._relays,
            keys=Keys(config.api_key, config.admin_key),
            limits=config.limits,
            clock=clock or SystemClock(),
            statistics=self.statistics,
            ids=RequestIds(),
            heads=KnownHeads(),
            access_log=config.access_log,
        )
        self._connections: set[ClientConnection] = set()
        self._listener: asyncio.Server | None = None
        self._empty = asyncio.Event()
        self._empty.set()
        self.closing = False

    async def start(self) -> int:
        """Listen, and return the port. Raises `OSError` where that cannot be done."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            lambda: ClientConnection(self._front, self),
            self._config.host,
            self._config.port,
            backlog=BACKLOG,
            ssl=self._tls,
        )
        port: int = self._listener.sockets[0].getsockname()[1]
        return port

    async def close(self, drain_s: float = 0.0) -> None:
        """Take no more, let what is being answered end for `drain_s` seconds, then cut it off."""
        self.closing = True
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        for connection in list(self._connections):
            connection.leave()
        try:
            async with asyncio.timeout(drain_s):
                await self._empty.wait()
        except TimeoutError:
            for connection in list(self._connections):
                connection.transport.abort()
            await self._empty.wait()
        for relay in self._relays.values():
            relay.close()

    def opened(self, connection: ClientConnection) -> None:
        """Called by a connection."""
        self._connections.add(connection)
        self._empty.clear()
        self.statistics.num_connections += 1

    def closed(self, connection: ClientConnection) -> None:
        """Called by a connection, once or more."""
        if connection in self._connections:
            self._connections.discard(connection)
            self.statistics.num_connections -= 1
            if not self._connections:
                self._empty.set()
