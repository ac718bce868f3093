"""A control process as a gateway hears it: registries and events of a job, told over HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from phalanx.gateway.http.message import JSON, HttpRequest, HttpResponse
from phalanx.gateway.http.queries import wait_s, whole
from phalanx.gateway.http.router import Access, Router
from phalanx.gateway.http.server import HttpServer, HttpServerConfig
from phalanx.routing.roles.encoded import EncodedDocuments
from phalanx.routing.roles.registry import RoleRegistry
from phalanx.routing.roles.snapshot import RoleContent


class Control:
    """`start`, `stop` at will, on one port."""

    def __init__(self, epoch: str = "e1", key: str | None = None, **roles: RoleContent) -> None:
        self.epoch = epoch
        self.registries = {name: RoleRegistry(name, epoch, told) for name, told in roles.items()}
        self.events: list[dict[str, object]] = []
        self.port = 0
        self.untold = ""
        """A role that is named, and not described."""
        self._key = key
        self._changed = asyncio.Event()
        self._server: HttpServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> None:
        router = Router()
        router.add("GET", "/v1/roles", self._roles, access=Access.ADMIN)
        router.add("GET", "/v1/roles/{role}", self._role, access=Access.ADMIN)
        router.add("GET", "/v1/events", self._events, access=Access.ADMIN)
        self._server = HttpServer(router, config=HttpServerConfig(port=port, admin_key=self._key))
        self.port = await self._server.start()

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.close()

    def publish(self, role: str, told: RoleContent) -> None:
        registry = self.registries[role]
        assert registry.publish(told, registry.snapshot.revision)

    def happen(self, kind: str, detail: str) -> None:
        event = {"number": len(self.events) + 1, "wall_s": 1.0, "role": "rollout", "kind": kind}
        self.events.append({**event, "detail": detail, "unknown": 1})
        self._changed.set()

    async def _roles(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse.json(200, {"roles": list(self.registries), "epoch": self.epoch})

    async def _role(self, request: HttpRequest) -> HttpResponse:
        registry = self.registries.get(request.params["role"])
        if registry is None or request.params["role"] == self.untold:
            return HttpResponse.json(404, {})
        after = whole(request, "after")
        snapshot = registry.snapshot
        if after is not None:
            snapshot = await registry.wait(after, wait_s(request), request.query.get("epoch"))
        return HttpResponse.of(200, EncodedDocuments().of(snapshot).internal, JSON)

    async def _events(self, request: HttpRequest) -> HttpResponse:
        after = whole(request, "after") or 0
        while len(self.events) <= after:
            self._changed.clear()
            await self._changed.wait()
        found = self.events[after:]
        told = {"epoch": self.epoch, "last": len(self.events), "events": found}
        return HttpResponse.of(200, json.dumps(told).encode(), JSON)


class Heard(logging.Handler):
    """Waits for what the gateway says of its control process."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self._new = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.words.append(record.getMessage())
        self._new.set()

    async def of(self, word: str) -> str:
        """The next thing that is said with that word in it."""
        while True:
            while self.words:
                said = self.words.pop(0)
                if word in said:
                    return said
            self._new.clear()
            await self._new.wait()


@asynccontextmanager
async def hearing() -> AsyncIterator[Heard]:
    heard = Heard()
    logger = logging.getLogger("phalanx.gateway.roles.following")
    level = logger.level
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    try:
        yield heard
    finally:
        logger.removeHandler(heard)
        logger.setLevel(level)
