"""Small HTTP servers on real sockets: a gateway whose role a test publishes, and scripted engines."""

from __future__ import annotations

import asyncio
import gzip
import json
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from urllib.parse import parse_qs, urlsplit

from phalanx.routing.roles.encoded import EncodedDocuments
from phalanx.routing.roles.registry import RoleRegistry
from phalanx.routing.roles.snapshot import ReplicaState, RoleContent, RoleModel, RoleReplica
from phalanx.schema.roles import RoutingSpec, WorkloadType

HOST = "127.0.0.1"
READY = ReplicaState.READY
DONE = b"data: [DONE]\n\n"


@dataclass
class Request:
    """`gone` is set when the client has closed the connection."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def path(self) -> str:
        return urlsplit(self.target).path

    @property
    def query(self) -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(urlsplit(self.target).query).items()}

    @property
    def json(self) -> dict:
        return json.loads(self.body or b"null")

    def answer(self, value: object, status: int = 200, **headers: str) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {given}" for name, given in headers.items()]
        self.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    def begin_stream(self) -> None:
        self.writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )

    def send(self, part: bytes) -> None:
        self.writer.write(b"%x\r\n%b\r\n" % (len(part), part))

    def event(self, value: object) -> None:
        self.send(b"data: " + json.dumps(value).encode() + b"\n\n")

    def end_stream(self) -> None:
        self.send(DONE)
        self.writer.write(b"0\r\n\r\n")

    def cut(self) -> None:
        """The connection is gone without an answer."""
        self.writer.transport.abort()


Behaviour = Callable[[Request], Awaitable[None]]


class FakeServer:
    """Answers by `behave`; `requests` are those that have arrived whole."""

    def __init__(self, behave: Behaviour) -> None:
        self.behave = behave
        self.requests: list[Request] = []
        self.connections = 0
        self._arrived = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self, port: int = 0, tls: ssl.SSLContext | None = None) -> str:
        self._server = await asyncio.start_server(
            self._connected, HOST, port, ssl=tls, backlog=4096
        )
        self._scheme = "http" if tls is None else "https"
        self.port = self._server.sockets[0].getsockname()[1]
        return self.url

    @property
    def url(self) -> str:
        return f"{self._scheme}://{HOST}:{self.port}"

    async def arrived(self, count: int = 1) -> Request:
        """The request of that number, once it is there."""
        while len(self.requests) < count:
            self._arrived.clear()
            await self._arrived.wait()
        return self.requests[count - 1]

    async def stop(self) -> None:
        """Nobody listens there afterwards."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            early = b""
            while (request := await _read(early, reader, writer)) is not None:
                self.requests.append(request)
                self._arrived.set()
                watch = asyncio.create_task(_watch(reader, request))
                try:
                    await self.behave(request)
                    await writer.drain()
                finally:
                    watch.cancel()
                    (seen,) = await asyncio.gather(watch, return_exceptions=True)
                    early = seen if isinstance(seen, bytes) else b""
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # in 3.11 a stream's task that ends cancelled is logged as an error
        finally:
            self._tasks.discard(task)
            writer.transport.abort()


async def _read(
    early: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> Request | None:
    try:
        head = early + await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    first, *lines = head.decode().split("\r\n")[:-2]
    method, target, _ = first.split(" ")
    headers = {
        name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Request(method, target, headers, body, writer)


async def _watch(reader: asyncio.StreamReader, request: Request) -> bytes:
    """Sets `gone`; what the client sends of its next request is handed on."""
    try:
        early = await reader.read(1)
    except ConnectionError:
        early = b""
    if not early:
        request.gone.set()
    return early


async def echo(request: Request) -> None:
    """What an engine was sent, where and with which headers."""
    request.answer({"path": request.path, "sent": request.json, "headers": dict(request.headers)})


class FakeEngine(FakeServer):
    """An engine, and the replica as which it is published."""

    def __init__(self, engine_id: str = "math/0", behave: Behaviour = echo) -> None:
        super().__init__(behave)
        self.engine_id = engine_id

    def replica(self, state: ReplicaState = READY, **changes: object) -> RoleReplica:
        return RoleReplica(self.engine_id, self.url, state, **changes)  # type: ignore[arg-type]


def model(name: str, *replicas: RoleReplica, **changes: object) -> RoleModel:
    state = changes.pop("state", READY)
    return RoleModel(name, state, replicas=replicas, **changes)  # type: ignore[arg-type]


def content(
    *models: RoleModel, routing: RoutingSpec | None = None, **changes: object
) -> RoleContent:
    return RoleContent(WorkloadType.TEACHER, routing or RoutingSpec(), models, **changes)  # type: ignore[arg-type]


class FakeGateway(FakeServer):
    """Discovery of one role over HTTP as a gateway serves it, and `forward` for everything else."""

    def __init__(
        self,
        of: RoleContent | None = None,
        *,
        role: str = "teacher",
        epoch: str = "e1",
        key: str | None = None,
    ) -> None:
        super().__init__(self._served)
        self.registry = RoleRegistry(role, epoch, of or content())
        self.documents = EncodedDocuments()
        self.key = key
        self.forward: Behaviour = echo
        self.asked: list[dict[str, str]] = []
        self.fault: Behaviour | None = None

    @property
    def role_url(self) -> str:
        return f"{self.url}/{self.registry.role}"

    def publish(self, of: RoleContent) -> None:
        assert self.registry.publish(of, self.registry.snapshot.revision)

    def show(self, *models: RoleModel, **changes: object) -> None:
        self.publish(replace(self.registry.snapshot.content, models=models, **changes))

    def start_anew(self, epoch: str, of: RoleContent) -> None:
        """As after a restart: another epoch, and revisions from the beginning."""
        old, self.registry = self.registry, RoleRegistry(self.registry.role, epoch, of)
        old.close()

    async def stop(self) -> None:
        self.registry.close()
        await super().stop()

    async def _served(self, request: Request) -> None:
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            request.answer({"error": {"message": "show the key"}}, 401)
        elif request.path != f"/{self.registry.role}/engines":
            await self.forward(request)
        elif self.fault is not None:
            await self.fault(request)
        else:
            await self._discovery(request)

    async def _discovery(self, request: Request) -> None:
        query = request.query
        self.asked.append(query)
        if "after" in query:
            await self.registry.wait(
                int(query["after"]), float(query["wait_s"]), query.get("epoch")
            )
        encoded = self.documents.of(self.registry.snapshot)
        if encoded.compressed is not None and "gzip" in request.headers["accept-encoding"]:
            assert gzip.decompress(encoded.compressed) == encoded.discovery
            request.answer(encoded.compressed, content_encoding="gzip")
        else:
            request.answer(encoded.discovery)
