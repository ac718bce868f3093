"""A network between a gateway and a server that can be cut: nothing passes any more, and nobody is
told.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from phalanx.routing.endpoint import Endpoint
from tests.gateway.policy_servers import HOST

PING = b"\x00\x00\x08\x06\x00\x00\x00\x00\x00"
"""The head of an HTTP/2 PING frame that is not an answer."""


class Network:
    """`cut` swallows everything from then on; `pinged` waits for pings to the server."""

    def __init__(self, server: Endpoint) -> None:
        self._server = server
        self._whole = True
        self._num_pings = 0
        self._ping_came = asyncio.Event()
        self._served: list[asyncio.Future[None]] = []
        self.endpoint = server

    def cut(self) -> None:
        self._whole = False

    async def pinged(self, count: int) -> None:
        while self._num_pings < count:
            self._ping_came.clear()
            await self._ping_came.wait()

    def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until both sides have closed it."""
        self._served.append(asyncio.ensure_future(self._serve(reader, writer)))

    async def close(self) -> None:
        for served in self._served:
            served.cancel()
        await asyncio.gather(*self._served, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server = await asyncio.open_connection(self._server.host, self._server.port)
        try:
            await asyncio.gather(
                self._pass(reader, server[1], asks=True), self._pass(server[0], writer)
            )
        finally:
            server[1].transport.abort()
            writer.transport.abort()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, asks: bool = False
    ) -> None:
        while data := await reader.read(65536):
            if asks and data.startswith(PING):
                self._num_pings += 1
                self._ping_came.set()
            if self._whole:
                writer.write(data)
        if self._whole:
            writer.close()


@asynccontextmanager
async def network(server: Endpoint) -> AsyncIterator[Network]:
    """In front of `server`; `endpoint` is where its clients connect."""
    between = Network(server)
    listener = await asyncio.start_server(between.take, HOST, 0)
    between.endpoint = Endpoint.parse(f"{HOST}:{listener.sockets[0].getsockname()[1]}")
    try:
        yield between
    finally:
        listener.close()
        await between.close()
