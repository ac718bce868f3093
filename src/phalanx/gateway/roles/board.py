"""`GET /v1/roles`: every role with its engines, their requests and the latest events, for operators."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from phalanx.gateway.http.message import HttpRequest, HttpResponse
from phalanx.gateway.http.router import Access, Router
from phalanx.gateway.roles.control_answers import ToldEvent
from phalanx.gateway.roles.inference_gateway import InferenceGateway
from phalanx.gateway.roles.role_set import RoleSet
from phalanx.gateway.roles.traffic import router_id
from phalanx.gateway.traffic import Quantiles
from phalanx.routing.roles.documents import internal
from phalanx.routing.roles.resolver import RouterTarget
from phalanx.routing.roles.snapshot import RoleModel
from phalanx.wire.discovery import InternalDocument
from phalanx.wire.phases import PhasesDocument


class Requests(msgspec.Struct, frozen=True):
    """Of one engine, or of a model's router, since this gateway knows it."""

    num_requests: int
    num_failed: int
    latency_ms: Quantiles
    per_second: tuple[int, ...]


class RoleView(InternalDocument, frozen=True, kw_only=True):
    """The role's own document; `in_flight` and `requests` by engine id, or `MODEL/router`.

    `source_fault`: why nothing new comes of its manager, or empty.
    """

    in_flight: dict[str, int]
    requests: dict[str, Requests]
    source_fault: str


class BoardView(msgspec.Struct, frozen=True):
    """Events have the newest last. `phases`: of the job that is followed."""

    roles: tuple[RoleView, ...]
    events: tuple[ToldEvent, ...]
    phases: PhasesDocument | None = None


class RoleBoard:
    """For the dashboard."""

    def __init__(
        self,
        roles: RoleSet,
        events: Callable[[], tuple[ToldEvent, ...]],
        phases: Callable[[], PhasesDocument | None],
    ) -> None:
        self._roles = roles
        self._events = events
        self._phases = phases

    def add_to(self, router: Router) -> None:
        router.add("GET", "/v1/roles", self.board, access=Access.ADMIN)

    async def board(self, request: HttpRequest) -> HttpResponse:
        view = BoardView(tuple(map(role_view, self._roles)), self._events(), self._phases())
        return HttpResponse.json(200, view)


def role_view(role: InferenceGateway) -> RoleView:
    snapshot = role.source.snapshot
    in_flight: dict[str, int] = {}
    for model in snapshot.content.models:
        in_flight.update(in_flight_of(role, model))
    document = internal(snapshot)
    return RoleView(
        **msgspec.structs.asdict(document),
        in_flight=in_flight,
        requests={server_id: _requests(role, server_id) for server_id in in_flight},
        source_fault=role.lost(),
    )


def in_flight_of(role: InferenceGateway, model: RoleModel) -> dict[str, int]:
    """By engine id, or of the model's router."""
    load = role.servers.balancer.load
    counts = {each.engine_id: load.count(each.server_id) for each in model.replicas}
    if model.router_url is not None:
        counts[router_id(model.name)] = load.count(RouterTarget(model, model.router_url).server_id)
    return counts


def _requests(role: InferenceGateway, server_id: str) -> Requests:
    traffic = role.servers.traffic.of(server_id)
    return Requests(traffic.num_requests, traffic.num_failed, traffic.latency, traffic.per_second)
