"""The pool as the dashboard and other gateways read it: the values of `GET /v1/pool`."""

from __future__ import annotations

import msgspec

from phalanx.gateway.pool import Pool, PoolEvent
from phalanx.gateway.traffic import Failure, Quantiles
from phalanx.routing.snapshot import Server, ServerState


class BackendView(msgspec.Struct, frozen=True):
    """A server as the routes under `/v1/backends` describe it."""

    server_id: str
    model_name: str
    endpoint: str
    healthy: bool
    in_flight_requests: int


class PlainServerView(msgspec.Struct, frozen=True):
    """What another gateway needs of a server."""

    server_id: str
    model_name: str
    endpoint: str
    managed: bool
    state: str


class PlainPoolView(msgspec.Struct, frozen=True):
    """`epoch` and `revision` are for the next `?epoch=&after=`."""

    epoch: str
    revision: int
    servers: tuple[PlainServerView, ...]


class ServerView(msgspec.Struct, frozen=True):
    """`in_flight_requests` are this gateway's own. `per_second` is the last minute, oldest first.

    `queue_ms` is the part of the latency in which no model worked for the request: it waited at the
    server, or travelled; known where servers say how long their models took.
    """

    server_id: str
    model_name: str
    endpoint: str
    scheme: str
    managed: bool
    state: str
    healthy: bool
    detail: str
    in_flight_requests: int
    num_requests: int
    num_failed: int
    latency_ms: Quantiles
    queue_ms: Quantiles
    per_second: tuple[int, ...]


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """`wall_s` is the gateway's clock, that of the events and the failures too, newest last.

    With `lerobot` there is `GET /v1/robots`, with `roles` there is `GET /v1/roles`. `following` is the gateway whose servers these are, and `follow_fault` why it is not heard.
    """

    version: str
    epoch: str
    revision: int
    wall_s: float
    uptime_s: float
    draining: bool
    lerobot: bool
    roles: bool
    following: str | None
    follow_fault: str
    num_connections: int
    servers: tuple[ServerView, ...]
    events: tuple[PoolEvent, ...]
    failures: tuple[Failure, ...]


def plain_pool(pool: Pool) -> PlainPoolView:
    snapshot = pool.snapshot
    servers = tuple(
        PlainServerView(
            server.server_id,
            server.model_name,
            str(server.endpoint),
            server.managed,
            str(server.state),
        )
        for server in snapshot.servers
    )
    return PlainPoolView(snapshot.epoch, snapshot.revision, servers)


def backend_view(pool: Pool, server: Server) -> BackendView:
    return BackendView(
        server.server_id,
        server.model_name,
        str(server.endpoint),
        server.state is ServerState.READY,
        pool.registry.load.count(server.server_id),
    )


def server_view(pool: Pool, server: Server) -> ServerView:
    traffic = pool.traffic.of(server.server_id)
    return ServerView(
        server_id=server.server_id,
        model_name=server.model_name,
        endpoint=str(server.endpoint),
        scheme=str(server.endpoint.scheme),
        managed=server.managed,
        state=str(server.state),
        healthy=server.state is ServerState.READY,
        detail=server.detail,
        in_flight_requests=pool.registry.load.count(server.server_id),
        num_requests=traffic.num_requests,
        num_failed=traffic.num_failed,
        latency_ms=traffic.latency,
        queue_ms=traffic.queue,
        per_second=traffic.per_second,
    )
