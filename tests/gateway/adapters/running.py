"""The gateway's HTTP side with the robots' adapters, in front of scripted policy servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    RejectConnection,
    Request,
    TextMessage,
)

from phalanx.clock import SystemClock
from phalanx.gateway.actions import ActionsAdapter
from phalanx.gateway.http.limits import HttpLimits
from phalanx.gateway.http.request_ids import RequestIds
from phalanx.gateway.http.router import Router
from phalanx.gateway.http.server import HttpServer, HttpServerConfig
from phalanx.gateway.openpi import OpenpiAdapter
from phalanx.gateway.workers import Workers
from phalanx.wire.msgpack_numpy import pack, unpack
from tests.gateway.policy_servers import HOST, FakePolicyServer, Fleet, fleet


@dataclass(frozen=True)
class Robots:
    """`fleet` is the gateway behind `port`."""

    fleet: Fleet
    port: int

    async def post(
        self, body: bytes, content_type: str = "application/msgpack"
    ) -> tuple[int, Mapping[str, str], bytes]:
        """`POST /v1/actions/generations` over a connection of its own."""
        reader, writer = await asyncio.open_connection(HOST, self.port)
        try:
            writer.write(
                f"POST /v1/actions/generations HTTP/1.1\r\nhost: gateway\r\n"
                f"content-type: {content_type}\r\ncontent-length: {len(body)}\r\n"
                f"connection: close\r\n\r\n".encode()
                + body
            )
            head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
            lines = head.decode().split("\r\n")
            fields = dict(line.lower().split(": ", 1) for line in lines[1:])
            return int(lines[0].split()[1]), fields, rest
        finally:
            writer.close()

    @asynccontextmanager
    async def openpi(
        self, target: str = "/", headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[OpenpiClient]:
        """An openpi client, its metadata read."""
        client = await OpenpiClient.connect(self.port, target, headers or {})
        try:
            yield client
        finally:
            client.leave()


class OpenpiClient:
    """openpi's side of its protocol."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._frames = WSConnection(ConnectionType.CLIENT)
        self._events: list[object] = []
        self.metadata: object = None

    @classmethod
    async def connect(cls, port: int, target: str, headers: Mapping[str, str]) -> OpenpiClient:
        client = cls(*await asyncio.open_connection(HOST, port))
        extra = [(name.encode(), value.encode()) for name, value in headers.items()]
        client._write(Request(host=f"{HOST}:{port}", target=target, extra_headers=extra))
        accepted = await client._event()
        if isinstance(accepted, RejectConnection):
            client.leave()
            raise ConnectionRefusedError(accepted.status_code)
        assert isinstance(accepted, AcceptConnection)
        client.metadata = unpack(await client.receive())
        return client

    async def infer(self, observation: object) -> dict[str, object] | str:
        self.send(pack(observation))
        message = await self.receive()
        return message if isinstance(message, str) else unpack(message)

    def send(self, message: bytes | str) -> None:
        kind = TextMessage if isinstance(message, str) else BytesMessage
        self._write(kind(data=message))

    async def receive(self) -> bytes | str:
        parts = []
        while True:
            event = await self._event()
            if isinstance(event, CloseConnection):
                raise ConnectionError(event.code, event.reason)
            parts.append(event.data)
            if event.message_finished:
                return type(event.data)().join(parts)

    def leave(self) -> None:
        self._writer.transport.abort()

    def _write(self, event: object) -> None:
        self._writer.write(self._frames.send(event))

    async def _event(self) -> object:
        while not self._events:
            data = await self._reader.read(65536)
            if not data:
                raise ConnectionError("the gateway closed the connection")
            self._frames.receive_data(data)
            self._events = list(self._frames.events())
        return self._events.pop(0)


@asynccontextmanager
async def robots(
    *servers: FakePolicyServer,
    api_key: str | None = None,
    default_model: str | None = None,
    max_body_bytes: int = 1 << 24,
) -> AsyncIterator[Robots]:
    """Those servers behind a gateway with both adapters."""
    async with fleet(*servers) as behind:
        workers = Workers(2)
        router = Router()
        OpenpiAdapter(
            behind.caller, workers, RequestIds(), SystemClock(), default_model=default_model
        ).add_to(router)
        ActionsAdapter(behind.caller, workers, default_model=default_model).add_to(router)
        config = HttpServerConfig(
            HOST, 0, api_key=api_key, limits=HttpLimits(max_body_bytes=max_body_bytes)
        )
        server = HttpServer(router, config=config)
        try:
            yield Robots(behind, await server.start())
        finally:
            await server.close()
            workers.close()
