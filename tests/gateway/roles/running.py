"""A role behind a gateway's HTTP server: a registry that the test publishes in, scripted engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from phalanx.clock import Clock, SystemClock
from phalanx.gateway.http.front import Relaying
from phalanx.gateway.http.limits import HttpLimits
from phalanx.gateway.http.router import Router
from phalanx.gateway.http.server import HttpServer, HttpServerConfig
from phalanx.gateway.roles.inference_gateway import InferenceGateway, RoleGatewaySettings
from phalanx.gateway.roles.role_set import RoleSet
from phalanx.routing.roles.registry import RoleRegistry
from phalanx.routing.roles.snapshot import (
    ReplicaState,
    RoleContent,
    RoleModel,
    RoleReplica,
)
from phalanx.schema.roles import RouteMode, RoutingSpec, WorkloadType
from tests.gateway.http.running import HOST, Answer, Client, read_request, run

__all__ = ["HOST", "Engine", "RoleFront", "ask_json", "content", "model", "role", "run"]

OK = b'{"text": "ok"}'
GENERATE, CHAT = "/rollout/generate", "/rollout/v1/chat/completions"


def url(port: int) -> str:
    return f"http://{HOST}:{port}"


def model(name: str, *ports: int, **changes: object) -> RoleModel:
    """With one ready replica a port; states as of the replicas unless told."""
    state = changes.pop("state", ReplicaState.READY)
    replicas = tuple(
        RoleReplica(f"{name}/{ordinal}", url(port), state) for ordinal, port in enumerate(ports)
    )
    return RoleModel(name, state, replicas=replicas, **changes)  # type: ignore[arg-type]


def routed(name: str, port: int, **changes: object) -> RoleModel:
    """A model behind a router."""
    return RoleModel(
        name,
        ReplicaState.READY,
        RouteMode.SGLANG_ROUTER,
        router_url=url(port),
        **changes,  # type: ignore[arg-type]
    )


def content(*models: RoleModel, **changes: object) -> RoleContent:
    workload = changes.pop("workload", WorkloadType.ROLLOUT)
    routing = changes.pop("routing", RoutingSpec())
    return RoleContent(workload, routing, models, **changes)  # type: ignore[arg-type]


@dataclass
class Engine:
    """A server that keeps what it is asked, heads and bodies, and answers `answer` with `status`."""

    answer: bytes = OK
    status: int = 200
    asked: list[tuple[bytes, bytes]] = field(default_factory=list)
    port: int = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    _came: asyncio.Event = field(default_factory=asyncio.Event)

    async def has_been_asked(self, count: int = 1) -> None:
        """Wait until so many requests have come in all."""
        while len(self.asked) < count:
            self._came.clear()
            await self._came.wait()

    @property
    def bodies(self) -> list[bytes]:
        return [body for _, body in self.asked]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                self.asked.append(await read_request(reader))
                self._came.set()
                await self.respond(writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.closed.set()
            writer.close()

    async def respond(self, writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 {self.status} X\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(self.answer)}\r\n\r\n".encode() + self.answer)


@asynccontextmanager
async def listening(*engines: Engine) -> AsyncIterator[tuple[int, ...]]:
    """Their ports, while they listen."""
    servers, tasks = [], set()

    async def serve(engine: Engine, reader, writer) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        await engine.serve(reader, writer)

    for engine in engines:

        def accept(reader, writer, engine=engine):
            return serve(engine, reader, writer)

        server = await asyncio.start_server(accept, HOST, engine.port, limit=2**22)
        engine.port = server.sockets[0].getsockname()[1]
        servers.append(server)
    try:
        yield tuple(engine.port for engine in engines)
    finally:
        for server in servers:
            server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class RoleFront:
    """The server's port, the role's gateway, and the registry behind it."""

    server: HttpServer
    gateway: InferenceGateway
    registry: RoleRegistry
    port: int
    clients: list[Client] = field(default_factory=list)
    _left: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        # The count follows when all listeners were told.
        loop = asyncio.get_running_loop()
        self.gateway.servers.balancer.load.listen(lambda *_: loop.call_soon(self._left.set))

    async def until_in_flight(self, count: int) -> None:
        """Wait until no more than so many requests are at engines."""
        while self.in_flight > count:
            self._left.clear()
            await self._left.wait()

    async def connect(self) -> Client:
        client = Client(*await asyncio.open_connection(HOST, self.port, limit=2**22))
        self.clients.append(client)
        return client

    async def ask(
        self, path: str, body: bytes | None = None, method: str = "", **headers: str
    ) -> Answer:
        """One request over a connection of its own; with a body it is a POST."""
        client = await self.connect()
        try:
            client.write(raw(path, body, method, **headers))
            return await client.answer()
        finally:
            client.close()

    def publish(self, new: RoleContent) -> None:
        assert self.registry.publish(new, self.registry.snapshot.revision)

    def change(self, name: str, **changes: object) -> None:
        """Publish a model with these changes."""
        old = self.registry.snapshot.content
        models = tuple(
            replace(each, **changes) if each.name == name else each  # type: ignore[arg-type]
            for each in old.models
        )
        self.publish(replace(old, models=models))

    @property
    def in_flight(self) -> int:
        return self.gateway.servers.balancer.load.total


def raw(path: str, body: bytes | None = None, method: str = "", **headers: str) -> bytes:
    method = method or ("GET" if body is None else "POST")
    lines = [f"{method} {path} HTTP/1.1", "host: gateway"]
    if body is not None:
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + (body or b"")


@asynccontextmanager
async def role(
    published: RoleContent,
    *,
    name: str = "rollout",
    limits: HttpLimits | None = None,
    clock: Clock | None = None,
    lost: str = "",
    **config: str | None,
) -> AsyncIterator[RoleFront]:
    """A started server with one role."""
    limits = limits or HttpLimits()
    registry = RoleRegistry(name, "epoch-1", published)
    is_open = not config
    gateway = InferenceGateway(
        name,
        registry,
        clock or SystemClock(),
        RoleGatewaySettings(is_open, limits),
        lost=lambda: lost,
    )
    relays: dict[str, Relaying] = {}
    roles, router = RoleSet(relays), Router()
    roles.add(gateway)
    router.mount(roles)
    server = HttpServer(router, relays, config=HttpServerConfig(limits=limits, **config))
    front = RoleFront(server, gateway, registry, await server.start())
    try:
        yield front
    finally:
        roles.close()
        for client in front.clients:
            client.close()
        await server.close()


def ask_json(answer: Answer) -> dict:
    """The JSON that was answered."""
    told: dict = json.loads(answer.body)
    return told
