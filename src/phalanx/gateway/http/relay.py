"""Relays requests to the HTTP servers of the gateway's pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from phalanx.errors import NoServerError, PhalanxError, UnknownModelError
from phalanx.gateway.http.exchange import Exchange
from phalanx.gateway.http.incoming_request import Bytes, IncomingRequest
from phalanx.gateway.http.limits import HttpLimits
from phalanx.gateway.http.model_choice import is_told_by_body, model_of
from phalanx.gateway.http.refusal import Refusal, refusal_of
from phalanx.gateway.http.request_head import (
    DROPPED,
    DROPPED_WITH_KEY,
    PLAIN_REQUEST,
    request_head,
)
from phalanx.gateway.http.upstream_pool import UpstreamPool
from phalanx.gateway.http.way import NOBODY, Place
from phalanx.gateway.http.work import Answerer, Work
from phalanx.routing.endpoint import Scheme
from phalanx.routing.load import Ticket
from phalanx.routing.snapshot import Server

_MAX_PLACES = 4096
_HTTP = Scheme.HTTP
"""Looked up once, for each request asks."""


class ServerPool(Protocol):
    """The gateway's pool, as a relay sees it."""

    def acquire(
        self, model: str | None, scheme: Scheme, exclude: frozenset[str] = NOBODY
    ) -> Ticket:
        """Choose and count in one step. Raises `UnknownModelError` or `NoServerError`."""
        ...

    def connect_failed(self, server_id: str, detail: str = "") -> None:
        """It does not listen: it gets nothing until it answers again. `detail`: why, in words."""
        ...


class Relay:
    """`default_model` answers requests that name none; `passes_authorization` says whether the
    caller's key is sent on to the backend; `elsewhere` says what the gateway has at other paths where
    it has no servers here, or is empty.
    """

    def __init__(
        self,
        pool: ServerPool,
        *,
        default_model: str | None = None,
        passes_authorization: bool = False,
        limits: HttpLimits | None = None,
        elsewhere: Callable[[], str] = lambda: "",
    ) -> None:
        self.upstreams = UpstreamPool(limits or HttpLimits())
        self._pool = pool
        self._dropped = DROPPED if passes_authorization else DROPPED_WITH_KEY
        self._default_model = default_model
        self._elsewhere = elsewhere
        self._places: dict[str, Place] = {}

    # Of the paths that it serves.

    def needs_whole_body(self, request: IncomingRequest) -> bool:
        return is_told_by_body(request)

    def work(self, caller: Answerer, request: IncomingRequest, request_id: bytes) -> Work | Refusal:
        try:
            model = model_of(request) or self._default_model
        except PhalanxError as error:
            return refusal_of(error)
        return Exchange(self, model, self.upstreams, caller, request, request_id)

    def close(self) -> None:
        """Close the connections that no request has."""
        self.upstreams.close()

    # The way of a request for `model`; None: the only one there is.

    def acquire(self, model: str | None, tried: frozenset[str]) -> Ticket[Server]:
        return self._pool.acquire(model, _HTTP, tried)

    def key(self, server: Server) -> str:
        return server.server_id

    def place(self, server: Server) -> Place:
        place = self._places.get(server.server_id)
        if place is None:
            if len(self._places) >= _MAX_PLACES:
                self._places.clear()
            endpoint, title = server.endpoint, f"the server of model {server.model_name!r}"
            place = Place(server.server_id, endpoint.host, endpoint.port, title)
            self._places[server.server_id] = place
        return place

    def unreachable(self, server: Server, why: str) -> None:
        self._pool.connect_failed(server.server_id, why)

    def message(
        self, model: str | None, request: IncomingRequest, request_id: bytes, server: Server
    ) -> list[Bytes]:
        known = request.known
        if known is not None and request.content_length > 0:
            onward = known.onward or request.onward(self._dropped)
            parts = (known.start_line, onward, request.content_length, request_id, request.parts[0])
            return [PLAIN_REQUEST % parts]
        out = request_head(request, request_id, self._dropped, server.endpoint.authority)
        if request.has_body:
            out += request.framed()
        return out

    def answer_fields(self, model: str | None) -> bytes:
        return b""

    def refusal(self, model: str | None, error: PhalanxError) -> Refusal:
        refusal = refusal_of(error)
        if isinstance(error, NoServerError | UnknownModelError) and (hint := self._elsewhere()):
            return replace(refusal, message=f"{hint} (here: {error})")
        return refusal
