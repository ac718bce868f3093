"""The operator's HTTP routes: health, the servers of the pool, its report, metrics, the dashboard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from importlib import resources

import msgspec

from phalanx import __version__
from phalanx.clock import Clock
from phalanx.errors import ConfigurationError, MalformedRequestError
from phalanx.gateway.http.message import JSON, HttpRequest, HttpResponse
from phalanx.gateway.http.queries import wait_s, whole
from phalanx.gateway.http.router import Access, Router
from phalanx.gateway.http.statistics import HttpStatistics
from phalanx.gateway.metrics import CONTENT_TYPE, GatewayMetrics
from phalanx.gateway.pool import Pool
from phalanx.gateway.report import (
    BackendView,
    PoolView,
    backend_view,
    plain_pool,
    server_view,
)
from phalanx.gateway.roles.inference_gateway import InferenceGateway
from phalanx.routing.endpoint import Endpoint
from phalanx.routing.resolver import RETRY_AFTER_S
from phalanx.routing.snapshot import ServerState


class Registration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/backends`."""

    model_name: str
    endpoint: str


class Backends(msgspec.Struct, frozen=True):
    backends: tuple[BackendView, ...]


@dataclass(frozen=True)
class Standing:
    """How the gateway itself is; `follow_fault` is why it does not hear the one that it follows."""

    draining: bool = False
    follow_fault: str = ""
    lerobot: bool = False
    roles: bool = False


class AdminApi:
    """`saved` waits until the pool is on disk and says why it is not, or is empty."""

    def __init__(
        self,
        pool: Pool,
        clock: Clock,
        http: HttpStatistics,
        *,
        standing: Callable[[], Standing],
        saved: Callable[[], Awaitable[str]],
        roles: Iterable[InferenceGateway] = (),
    ) -> None:
        self._pool = pool
        self._clock = clock
        self._http = http
        self._metrics = GatewayMetrics(pool, http, roles)
        self._roles = roles
        self._standing = standing
        self._saved = saved
        self._started_s = clock.monotonic_s()
        self._page = resources.files(__package__).joinpath("dashboard.html").read_bytes()

    def add_to(self, router: Router) -> None:
        router.add("GET", "/", self.dashboard, access=Access.OPEN)
        router.add("GET", "/health", self.health, access=Access.OPEN)
        router.add("GET", "/ready", self.ready, access=Access.OPEN)
        router.add("GET", "/metrics", self.metrics, access=Access.ADMIN)
        router.add("GET", "/v1/pool", self.report, access=Access.ADMIN)
        router.add("GET", "/v1/backends", self.list, access=Access.ADMIN)
        router.add("POST", "/v1/backends", self.add, access=Access.ADMIN)
        router.add("DELETE", "/v1/backends/{server_id}", self.remove, access=Access.ADMIN)

    async def dashboard(self, request: HttpRequest) -> HttpResponse:
        headers = {
            "cache-control": "no-cache",
            "content-security-policy": "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
            "script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
            "frame-ancestors 'none'",
        }
        return HttpResponse.of(200, self._page, "text/html; charset=utf-8", headers)

    async def health(self, request: HttpRequest) -> HttpResponse:
        """The gateway's own life, whatever its servers do."""
        return HttpResponse.json(200, {"status": "ok"})

    async def ready(self, request: HttpRequest) -> HttpResponse:
        """Whether a request would find a server, or a role's engine: of `?model=`, or of any model.

        Whoever asks shows no key, and is told of models no more than the name that was given.
        """
        model = request.query.get("model")
        states = Counter(
            str(server.state)
            for server in self._pool.snapshot.servers
            if model in (None, server.model_name)
        )
        for role in self._roles:
            states.update(role.states(model))
        detail = _unready(states, model, draining=self._standing().draining)
        value = {"num_servers": states.total(), "num_ready": states[ServerState.READY]}
        if detail:
            refusal = {"status": "not_ready", "detail": detail, **value}
            return HttpResponse.json(503, refusal, {"retry-after": str(RETRY_AFTER_S)})
        return HttpResponse.json(200, {"status": "ready", **value})

    async def metrics(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse.of(200, self._metrics.text(), CONTENT_TYPE)

    async def report(self, request: HttpRequest) -> HttpResponse:
        """The pool; with `?after=REVISION&wait_s=` as soon as it is another, or after that time.

        `epoch` tells a gateway that has started anew; `detail=0` leaves out what a follower of the
        pool does not need.
        """
        try:
            after, seconds = whole(request, "after"), wait_s(request)
        except MalformedRequestError as error:
            return _refused(400, "malformed_request", str(error))
        if after is not None:
            await self._pool.watch(after, seconds, request.query.get("epoch"))
        if request.query.get("detail") == "0":
            return HttpResponse.json(200, plain_pool(self._pool))
        return HttpResponse.json(200, self._view())

    async def list(self, request: HttpRequest) -> HttpResponse:
        servers = self._pool.snapshot.servers
        backends = tuple(backend_view(self._pool, server) for server in servers)
        return HttpResponse.json(200, Backends(backends))

    async def add(self, request: HttpRequest) -> HttpResponse:
        """Register a server; it gets requests after its first successful probe."""
        if self._pool.registry.mirrors is not None:
            return self._elsewhere()
        if request.content_type != JSON:
            return _not_json()
        try:
            given = msgspec.json.decode(request.body, type=Registration)
            endpoint = Endpoint.parse(given.endpoint)
            server = self._pool.registry.register_managed(given.model_name, endpoint)
        except msgspec.ValidationError as error:
            return _refused(422, "invalid_request", f'{error}; send {{"model_name", "endpoint"}}')
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return _refused(400, "malformed_request", f"the body is not JSON: {error}")
        except ConfigurationError as error:
            return _refused(422, "invalid_request", str(error))
        fault = await self._saved()
        if fault:
            return _refused(500, "not_saved", f"{endpoint} is registered, but {fault}")
        return HttpResponse.json(202, backend_view(self._pool, server))

    async def remove(self, request: HttpRequest) -> HttpResponse:
        """Give a server no more requests. Those that it has go on, and nobody waits for them."""
        if self._pool.registry.mirrors is not None:
            return self._elsewhere()
        if request.body and request.content_type != JSON:
            return _not_json()
        server_id = request.params["server_id"]
        if not self._pool.registry.remove(server_id):
            return _refused(404, "not_found", f"there is no server {server_id!r}")
        fault = await self._saved()
        if fault:
            return _refused(500, "not_saved", f"{server_id} is removed, but {fault}")
        return HttpResponse(204)

    def _view(self) -> PoolView:
        pool, standing = self._pool, self._standing()
        snapshot = pool.snapshot
        return PoolView(
            version=__version__,
            epoch=snapshot.epoch,
            revision=snapshot.revision,
            wall_s=self._clock.wall_s(),
            uptime_s=self._clock.monotonic_s() - self._started_s,
            draining=standing.draining,
            lerobot=standing.lerobot,
            roles=standing.roles,
            following=pool.registry.mirrors,
            follow_fault=standing.follow_fault,
            num_connections=self._http.num_connections,
            servers=tuple(server_view(pool, server) for server in snapshot.servers),
            events=pool.events,
            failures=pool.traffic.failures,
        )

    def _elsewhere(self) -> HttpResponse:
        leader = self._pool.registry.mirrors
        message = f"this gateway has the servers of {leader}: add and remove them there"
        return _refused(409, "following", message)


def _unready(states: Counter[str], model: str | None, *, draining: bool) -> str:
    """Why no request would find a server, or nothing."""
    if draining:
        return "the gateway is shutting down"
    if states[ServerState.READY]:
        return ""
    of_model = "" if model is None else f" of model {model!r}"
    if not states:
        return f"no server{of_model} is registered"
    return f"no server{of_model} is ready: " + ", ".join(
        f"{num} {state}" for state, num in states.items()
    )


def _refused(status: int, code: str, message: str) -> HttpResponse:
    return HttpResponse.json(status, {"error": {"code": code, "message": message}})


def _not_json() -> HttpResponse:
    # Other types could be sent by any web page that a browser on this machine shows.
    return _refused(415, "unsupported_media_type", f"send JSON, as content-type: {JSON}")
