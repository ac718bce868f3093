"""A gateway's HTTP server in front of scripted backends, all on one event loop and real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import uvloop

from phalanx.clock import SystemClock
from phalanx.gateway.http.limits import HttpLimits
from phalanx.gateway.http.relay import Relay
from phalanx.gateway.http.router import POOL, Router
from phalanx.gateway.http.server import HttpServer, HttpServerConfig
from phalanx.gateway.pool import Pool
from phalanx.routing.endpoint import Endpoint, Scheme
from phalanx.routing.load import Ticket
from phalanx.routing.pool_policy import PoolPolicy
from phalanx.routing.pool_registry import PoolRegistry
from phalanx.routing.publisher import Publisher
from phalanx.routing.registration import Probe
from phalanx.routing.snapshot import ServerState

T = TypeVar("T")
HOST = "127.0.0.1"
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def run(work: Coroutine[None, None, T]) -> T:
    """On the loop that the gateway runs on."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


class Servers:
    """The gateway's pool with servers of models, all ready, and nobody who probes them."""

    def __init__(self, **models: tuple[int, ...]) -> None:
        clock = SystemClock()
        self.registry = PoolRegistry(Publisher("test"), clock, PoolPolicy())
        self.pool = Pool(self.registry, clock)
        self.ids: dict[int, str] = {}
        for model, ports in models.items():
            for port in ports:
                endpoint = Endpoint(Scheme.HTTP, HOST, port)
                server_id = self.registry.register_managed(model, endpoint).server_id
                self.registry.observe(server_id, Probe.HEALTHY)
                self.ids[port] = server_id
        self._left = asyncio.Event()
        self.codes: list[str] = []
        self.registry.load.listen(self._ended)

    @property
    def in_flight(self) -> int:
        return self.registry.load.total

    def state(self, port: int) -> ServerState:
        return self.pool.snapshot.by_id[self.ids[port]].state

    async def left(self, count: int = 1) -> None:
        """Wait until so many requests have left their server in all, and none is there."""
        while len(self.codes) < count:
            self._left.clear()
            await self._left.wait()
        assert len(self.codes) == count and self.in_flight == 0

    def _ended(self, ticket: Ticket, duration_s: float) -> None:
        self.codes.append(ticket.code)
        # The count follows when all listeners were told.
        asyncio.get_running_loop().call_soon(self._left.set)


@dataclass
class Backend:
    """A scripted server; `connections` counts those that were made, `open` those that are."""

    script: Script
    port: int = 0
    connections: int = 0
    open: int = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            await self.script(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()
            self.open -= 1
            if self.open == 0:
                self.closed.set()


@dataclass(frozen=True)
class Gateway:
    server: HttpServer
    relay: Relay
    servers: Servers
    port: int
    clients: list[Client] = field(default_factory=list)

    async def connect(self) -> Client:
        """Closed with the gateway, if not before."""
        client = Client(*await asyncio.open_connection(HOST, self.port, limit=2**20))
        self.clients.append(client)
        return client

    async def ask(self, data: bytes) -> Answer:
        """One request over a connection of its own."""
        client = await self.connect()
        try:
            client.write(data)
            return await client.answer()
        finally:
            client.close()


@dataclass(frozen=True)
class Answer:
    """A response; `whole` is False where its body was cut off."""

    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool = True


class Client:
    """The bytes of one client's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def write(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self, *, without_body: bool = False) -> Answer:
        head = await self.reader.readuntil(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        status = int(lines[0].split()[1])
        headers: dict[str, str] = {}
        for line in lines[1:-2]:
            name, _, value = line.partition(": ")
            assert name not in headers, f"{name} is there twice"
            headers[name] = value
        if without_body or status < 200 or status in (204, 304):
            return Answer(status, headers, b"")
        body, whole = await self._body(headers)
        return Answer(status, headers, body, whole)

    async def _body(self, headers: dict[str, str]) -> tuple[bytes, bool]:
        reader = self.reader
        body = b""
        try:
            if "content-length" in headers:
                return await reader.readexactly(int(headers["content-length"])), True
            if headers.get("transfer-encoding") == "chunked":
                while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
                    body += (await reader.readexactly(size + 2))[:-2]
                await reader.readexactly(2)
                return body, True
            while piece := await reader.read(65536):
                body += piece
        except (asyncio.IncompleteReadError, ConnectionError):
            return body, False
        return body, True

    async def ended(self) -> bool:
        """Whether the gateway has closed the connection."""
        try:
            return await self.reader.read(1) == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        self.writer.close()


@asynccontextmanager
async def backend(script: Script):
    """A listening backend, which is closed with its connections."""
    scripted = Backend(script)
    server = await asyncio.start_server(scripted.serve, HOST, 0, limit=2**20)
    scripted.port = server.sockets[0].getsockname()[1]
    try:
        yield scripted
    finally:
        server.close()
        tasks = [task for task in asyncio.all_tasks() if "Backend.serve" in repr(task.get_coro())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def gateway(
    servers: Servers,
    router: Router | None = None,
    *,
    limits: HttpLimits | None = None,
    passes_authorization: bool = False,
    default_model: str | None = None,
    **config: str | bool | None,
):
    """A started HTTP server that relays all paths without a handler to the pool's servers."""
    router = router or Router()
    router.relay("/")
    limits = limits or HttpLimits()
    relay = Relay(
        servers.pool,
        default_model=default_model,
        passes_authorization=passes_authorization,
        limits=limits,
    )
    server = HttpServer(router, {POOL: relay}, config=HttpServerConfig(limits=limits, **config))
    port = await server.start()
    front = Gateway(server, relay, servers, port)
    try:
        yield front
    finally:
        for client in front.clients:
            client.close()
        await server.close()


@asynccontextmanager
async def relayed(script: Script, **options):
    """A gateway in front of one scripted backend of the model `m`."""
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(backend(script))
        front = await stack.enter_async_context(gateway(Servers(m=(one.port,)), **options))
        yield front, one


def request(method: str = "POST", path: str = "/v1/x", body: bytes = b"", **headers: str) -> bytes:
    """A request with its length."""
    lines = [f"{method} {path} HTTP/1.1", "host: gateway"]
    if body or method == "POST":
        lines.append(f"content-length: {len(body)}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """The head and the body of one request, as a backend gets them."""
    head = await reader.readuntil(b"\r\n\r\n")
    body = b""
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            body = await reader.readexactly(int(line.partition(b":")[2]))
        if line == b"transfer-encoding: chunked":
            while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readexactly(2)
    return head, body


def answering(response: bytes) -> Script:
    """Answers each request of a connection with these bytes."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            writer.write(response)

    return script


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def ask(*requests: bytes, script=None, **options):
    """The answers to requests, each over a connection of its own."""

    async def scenario():
        async with relayed(script or answering(OK), **options) as (front, _):
            return [await front.ask(each) for each in requests]

    return run(scenario())
