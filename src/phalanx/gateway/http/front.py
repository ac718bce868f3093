"""Decides what a request whose head is there becomes: work, a refusal, or a wait for its body."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from phalanx.clock import Clock
from phalanx.gateway.http.handling import Handling, request_for
from phalanx.gateway.http.incoming_request import IncomingRequest
from phalanx.gateway.http.keys import Keys
from phalanx.gateway.http.limits import HttpLimits
from phalanx.gateway.http.refusal import Refusal
from phalanx.gateway.http.request_ids import RequestIds
from phalanx.gateway.http.router import (
    Access,
    HandlerRoute,
    NoRoute,
    RelayRoute,
    Route,
    Router,
    WebSocketRoute,
)
from phalanx.gateway.http.statistics import HttpStatistics
from phalanx.gateway.http.websocket_work import WebSocketWork, handshake_fault
from phalanx.gateway.http.whole_message import KnownHeads
from phalanx.gateway.http.work import Answerer, Work


class Relaying(Protocol):
    """What makes the works of relayed requests."""

    def needs_whole_body(self, request: IncomingRequest) -> bool:
        """Whether a work can only be made when the body is there."""
        ...

    def work(self, caller: Answerer, request: IncomingRequest, request_id: bytes) -> Work | Refusal:
        """What answers it, ready to start."""
        ...

    def close(self) -> None:
        """Let go of what no request has."""
        ...


@dataclass(frozen=True)
class Front:
    """Everything that the connections of one server share. `relays` by the names that routes give."""

    router: Router
    relays: Mapping[str, Relaying]
    keys: Keys
    limits: HttpLimits
    clock: Clock
    statistics: HttpStatistics
    ids: RequestIds
    heads: KnownHeads
    access_log: bool

    def route(self, request: IncomingRequest) -> Route | Refusal:
        """Where the request goes, once it may: known from its head alone, and kept with it: then
        the same bytes, key and all, were let in before.
        """
        route = self._find(request)
        if request.known is not None and not isinstance(route, Refusal):
            request.known.route = route
        return route

    def _find(self, request: IncomingRequest) -> Route | Refusal:
        if request.method == "CONNECT":
            return Refusal(405, "method_not_allowed", "this is no proxy for other hosts")
        route = self.router.find(request.method, request.path, upgrade=request.upgrade)
        if isinstance(route, NoRoute):
            return route.now or _no_route(request, route)
        if not self.keys.allow(route.access, request.get(b"authorization") or b""):
            message = "send the gateway's key as `Authorization: Bearer KEY`"
            return Refusal(401, "invalid_api_key", message)
        for_operators = route.access is Access.ADMIN
        if (for_operators or isinstance(route, WebSocketRoute)) and _is_foreign(request):
            message = (
                "a page of another origin asked for this; the gateway answers none but its own"
            )
            return Refusal(403, "foreign_origin", message)
        if isinstance(route, RelayRoute):
            if route.to not in self.relays:
                return Refusal(404, "not_found", f"{request.path}: there are no HTTP backends")
            if _has_dots(request.path):
                message = f"the path {request.path!r} has dot segments; send it without"
                return Refusal(400, "malformed_request", message)
        return route

    def needs_whole_body(self, route: Route, request: IncomingRequest) -> bool:
        """Whether the work can only start when the body is there."""
        return not isinstance(route, RelayRoute) or self.relays[route.to].needs_whole_body(request)

    def work(
        self, route: Route, caller: Answerer, request: IncomingRequest, request_id: bytes
    ) -> Work | Refusal:
        """What answers it, ready to start."""
        if isinstance(route, RelayRoute):
            return self.relays[route.to].work(caller, request, request_id)
        assert not isinstance(route, NoRoute)
        given = request_for(request, request_id.decode(), caller.peer, route.params)
        if isinstance(route, HandlerRoute):
            return Handling(caller, route.handler, given)
        fault = handshake_fault(given)
        if fault:
            return Refusal(400, "malformed_request", fault)
        return WebSocketWork(caller, route, given, self.limits)


def _no_route(request: IncomingRequest, route: NoRoute) -> Refusal:
    if route.allowed:
        allowed = route.allowed
        message = f"{request.path} has no {request.method}; allowed: {', '.join(allowed)}"
        return Refusal(405, "method_not_allowed", message, allowed=allowed)
    return Refusal(404, "not_found", f"there is nothing at {request.path}")


def _is_foreign(request: IncomingRequest) -> bool:
    """Whether a browser asks for a page that is not from here. It tells so by itself; what is no
    browser has no origin.
    """
    origin = request.get(b"origin")
    if origin is None:
        return False
    host = (request.get(b"host") or b"").lower()
    return not host or origin.lower().partition(b"://")[2] != host


def _has_dots(path: str) -> bool:
    """Whether a backend could understand another path than the one that was looked at."""
    if "%" not in path and "/." not in path:
        return False
    if "%" in path:
        path = path.replace("%2e", ".").replace("%2E", ".").replace("%2f", "/").replace("%2F", "/")
    return "/." in path and any(part in (".", "..") for part in path.split("/"))
