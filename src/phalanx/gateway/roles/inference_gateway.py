"""A role's HTTP side: one class for every role, one instance each, which knows nothing of how its
engines are started, put to sleep or ended.

It never wakes an engine for a request, and answers discovery, health and models whatever its engines
and its manager do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote

import msgspec

from phalanx.clock import Clock
from phalanx.gateway.http.front import Relaying
from phalanx.gateway.http.limits import HttpLimits
from phalanx.gateway.http.message import Handler, HttpRequest, HttpResponse
from phalanx.gateway.http.refusal import Refusal
from phalanx.gateway.http.router import Access, HandlerRoute, NoRoute, RelayRoute, Route
from phalanx.gateway.http.upstream_pool import UpstreamPool
from phalanx.gateway.roles.discovery import Discovery
from phalanx.gateway.roles.judge import Judge
from phalanx.gateway.roles.places import RolePlaces
from phalanx.gateway.roles.relay import RoleRelay
from phalanx.gateway.roles.servers import RoleServers
from phalanx.gateway.roles.source import RoleSource
from phalanx.gateway.roles.way import Kind, RoleWay
from phalanx.routing.roles.snapshot import ReplicaState, RoleModel
from phalanx.schema.roles import RouteMode, WorkloadType

RETRY_AFTER_S = 1
ONE_MODEL = "v1/models/"
_POSTED = {
    "generate": Kind.GENERATE,
    "chat/completions": Kind.CHAT,
    "v1/chat/completions": Kind.CHAT,
}


class _Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "phalanx"


class _Models(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: tuple[_Model, ...]


class _ModelHealth(msgspec.Struct, frozen=True):
    state: str
    ready: bool
    replicas: dict[str, int]


class _Health(msgspec.Struct, frozen=True, kw_only=True):
    """`ready`: whether every model takes requests. `manager_fault`: why the manager is not heard."""

    status: str = "ok"
    role: str
    ready: bool
    phase: str | None
    registry_epoch: str
    topology_revision: int
    manager_fault: str
    models: dict[str, _ModelHealth]


@dataclass(frozen=True)
class RoleGatewaySettings:
    """`passes_authorization`: engines get the caller's own key, for the gateway asks for none."""

    passes_authorization: bool = False
    limits: HttpLimits = field(default_factory=HttpLimits)


class InferenceGateway:
    """The role's paths, and `relays` for those that go to engines. `source` is where its snapshots
    come from, and `lost` says why nothing new comes of it, or is empty.
    """

    def __init__(
        self,
        role: str,
        source: RoleSource,
        clock: Clock,
        settings: RoleGatewaySettings | None = None,
        *,
        lost: Callable[[], str] = lambda: "",
    ) -> None:
        settings = settings or RoleGatewaySettings()
        self.role = role
        self.source = source
        self.lost = lost
        self.servers = RoleServers(source, clock)
        self._created = int(clock.wall_s())
        upstreams = UpstreamPool(settings.limits)
        places = RolePlaces(role)
        with_key = settings.passes_authorization
        judge = None
        if source.snapshot.content.workload is WorkloadType.GENRM:
            judge = Judge(self.servers, places, upstreams, passes_authorization=with_key)
        ways = {
            kind: RoleWay(kind, self.servers, places, passes_authorization=with_key)
            for kind in Kind
        }
        self.relays: Mapping[str, Relaying] = {
            f"{role}/generate": RoleRelay(ways[Kind.GENERATE], self.servers, upstreams, judge),
            f"{role}/chat": RoleRelay(ways[Kind.CHAT], self.servers, upstreams),
        }
        self._handlers: Mapping[str, Handler] = {
            "engines": Discovery(source, lost).engines,
            "health": self.health,
            "v1/models": self.models,
        }

    def find(self, method: str, path: str) -> Route:
        """What answers `path`, which is what follows the role's name and a slash."""
        handler, params = self._handlers.get(path), {}
        if handler is None and path.startswith(ONE_MODEL) and path != ONE_MODEL:
            handler, params = self.model, {"name": unquote(path.removeprefix(ONE_MODEL))}
        if handler is not None:
            if method != "GET":
                return NoRoute(("GET",))
            return HandlerRoute(handler, Access.INFERENCE, params)
        kind = _POSTED.get(path)
        if kind is None:
            return NoRoute()
        if method != "POST":
            return NoRoute(("POST",))
        name = "generate" if kind is Kind.GENERATE else "chat"
        return RelayRoute(Access.INFERENCE, f"{self.role}/{name}")

    async def health(self, request: HttpRequest) -> HttpResponse:
        """200 while the gateway works; with `?ready=1` 503 unless every model, or that of `&model=`,
        takes requests.
        """
        snapshot = self.source.snapshot
        models = {model.name: _health(model) for model in snapshot.content.models}
        told = _Health(
            role=self.role,
            ready=bool(models) and all(model.ready for model in models.values()),
            phase=snapshot.content.phase,
            registry_epoch=snapshot.epoch,
            topology_revision=snapshot.revision,
            manager_fault=self.lost(),
            models=models,
        )
        name = request.query.get("model")
        ready = told.ready if name is None else name in models and models[name].ready
        if request.query.get("ready", "0") in ("0", "false") or ready:
            return HttpResponse.json(200, told)
        return HttpResponse.json(503, told, {"retry-after": str(RETRY_AFTER_S)})

    async def models(self, request: HttpRequest) -> HttpResponse:
        """OpenAI's list of the role's models, aliases too."""
        content = self.source.snapshot.content
        names = (*content.by_name, *content.routing.aliases)
        models = tuple(_Model(id=name, created=self._created) for name in names)
        return HttpResponse.json(200, _Models(data=models))

    async def model(self, request: HttpRequest) -> HttpResponse:
        """One of `models`, by its name or alias."""
        content, name = self.source.snapshot.content, request.params["name"]
        names = (*content.by_name, *content.routing.aliases)
        if name in names:
            return HttpResponse.json(200, _Model(id=name, created=self._created))
        known = ", ".join(map(repr, names)) or "none yet"
        message = f"role {self.role!r} has no model {name[:200]!r}; known: {known}"
        return Refusal(404, "model_not_found", message).response(request.path)

    def states(self, name: str | None) -> Counter[str]:
        """Those of the engines (or the router) of a model or alias; None: of all models."""
        content = self.source.snapshot.content
        wanted = None if name is None else content.routing.aliases.get(name, name)
        counts: Counter[str] = Counter()
        for model in content.models:
            if wanted in (None, model.name):
                by_router = model.route_mode is RouteMode.SGLANG_ROUTER
                counts.update({str(model.state): 1} if by_router else _health(model).replicas)
        return counts

    def close(self) -> None:
        """Answer those who wait for a change."""
        self.source.close()


def _health(model: RoleModel) -> _ModelHealth:
    states = Counter(str(replica.state) for replica in model.replicas)
    by_router = model.route_mode is RouteMode.SGLANG_ROUTER
    usable = model.router_url is not None if by_router else bool(model.serving)
    ready = model.state is ReplicaState.READY and usable
    return _ModelHealth(str(model.state), ready, dict(states))
