"""How a role's request finds its engine, and what that engine is sent."""

from __future__ import annotations

import enum

import msgspec

from phalanx.errors import NoServerError, PhalanxError, RoleNotReadyError
from phalanx.gateway.http.fields import INFERENCE_MODEL
from phalanx.gateway.http.incoming_request import Bytes, IncomingRequest
from phalanx.gateway.http.refusal import Refusal
from phalanx.gateway.http.request_head import DROPPED, DROPPED_WITH_KEY, PLAIN_REQUEST
from phalanx.gateway.http.way import Place
from phalanx.gateway.roles.places import RolePlaces
from phalanx.gateway.roles.routing_fields import (
    RoutingFields,
    for_chat,
    for_generate,
    served_name,
)
from phalanx.gateway.roles.servers import RoleServers
from phalanx.routing.load import Ticket
from phalanx.routing.roles.balancer import RoleServer
from phalanx.routing.roles.resolver import RoleSelector, RoleTarget
from phalanx.wire.discovery import refusal_body, refusal_status

_MAX_STARTS = 4096
_MAX_SPOKEN = 1024
_QUESTION_MARK = 0x3F
_UNSET = msgspec.UNSET
_OWN = frozenset({b"host", b"content-length"})


class Kind(enum.Enum):
    """What an engine is asked; the value is its path there."""

    GENERATE = b"/generate"
    CHAT = b"/v1/chat/completions"


class Spoken:
    """How a model is spoken of: `label` says in an answer's head that it gave it, `served` is its
    engines' name of it. `target` is where its requests go.
    """

    __slots__ = ("label", "served", "target")

    def __init__(self, target: RoleTarget) -> None:
        model = target.model
        self.target = target
        self.label = label(model.name)
        self.served = served_name(model.served_model_name or model.name)


class RoleWish(msgspec.Struct, eq=False):
    """One request: its body, and what that says of where it goes. `spoken` is known once one of its
    model's servers was chosen.
    """

    body: bytes
    fields: RoutingFields
    affinity: str | None
    spoken: Spoken | None = None


def selector_of(fields: RoutingFields) -> RoleSelector:
    """Null and absent are the same."""
    model, route_key = fields.model, fields.route_key
    return RoleSelector(
        None if model is msgspec.UNSET else model,
        None if route_key is msgspec.UNSET else route_key,
    )


class RoleWay:
    """That of one kind of request, to the servers of one role."""

    def __init__(
        self, kind: Kind, servers: RoleServers, places: RolePlaces, *, passes_authorization: bool
    ) -> None:
        self._path = kind.value
        self._is_generate = kind is Kind.GENERATE
        self._servers = servers
        self._places = places
        self._dropped = _OWN | (DROPPED if passes_authorization else DROPPED_WITH_KEY)
        self._starts: dict[str, bytes] = {}
        # By what requests say, which most of them say alike, as long as the snapshot is the same.
        self._spoken: dict[tuple[object, object], Spoken] = {}
        self._spoken_of = servers.snapshot

    def acquire(self, wish: RoleWish, tried: frozenset[str]) -> Ticket[RoleServer]:
        servers, fields = self._servers, wish.fields
        spoken = self._spoken.get((fields.model, fields.route_key))
        if spoken is None or self._spoken_of is not servers.snapshot:
            spoken = self._find(fields)
        ticket = servers.choose(spoken.target, wish.affinity, tried)
        wish.spoken = spoken
        if ticket.server.base_url not in self._starts:
            try:
                self._known(ticket.server)
            except NoServerError as error:
                ticket.outcome("503", message=str(error))
                ticket.release()
                raise
        return ticket

    def key(self, server: RoleServer) -> str:
        return server.base_url or ""

    def place(self, server: RoleServer) -> Place:
        return self._places.of(server.base_url or "")

    def unreachable(self, server: RoleServer, why: str) -> None:
        self._servers.unreachable(server)

    def message(
        self, wish: RoleWish, request: IncomingRequest, request_id: bytes, server: RoleServer
    ) -> list[Bytes]:
        spoken = wish.spoken
        assert spoken is not None, "it was chosen"
        body, fields = wish.body, wish.fields
        if self._is_generate:
            body = for_generate(body, fields)
        elif fields.route_key is _UNSET and fields.model is not _UNSET:
            body = spoken.served.put(body)  # as `for_chat` does, with a call less
        else:
            body = for_chat(body, fields, spoken.served)
        known = request.known
        if known is not None:
            start = b"" if known.has_query else self._starts.get(server.base_url or "", b"")
            start = start or self._start(known.target, server)
            onward = known.onward or request.onward(self._dropped)
            return [PLAIN_REQUEST % (start, onward, len(body), request_id, body)]
        start, onward = self._start(request.target, server), request.onward(self._dropped)
        head = PLAIN_REQUEST % (start, onward, len(body), request_id, b"")
        return [head, body]  # which may be large

    def answer_fields(self, wish: RoleWish) -> bytes:
        return b"" if wish.spoken is None else wish.spoken.label

    def refusal(self, wish: RoleWish, error: PhalanxError) -> Refusal:
        return role_refusal(error, self.answer_fields(wish))

    def _find(self, fields: RoutingFields) -> Spoken:
        """Raises as `resolve` does."""
        snapshot = self._servers.snapshot
        if self._spoken_of is not snapshot or len(self._spoken) >= _MAX_SPOKEN:
            self._spoken = {}
            self._spoken_of = snapshot
        spoken = Spoken(self._servers.target(selector_of(fields)))
        self._spoken[fields.model, fields.route_key] = spoken
        return spoken

    def _start(self, target: bytes, server: RoleServer) -> bytes:
        base_url = server.base_url or ""
        if _QUESTION_MARK in target:
            return self._start_line(base_url, target[target.index(b"?") :])
        return self._starts.get(base_url) or self._start_line(base_url, b"")

    def _known(self, server: RoleServer) -> None:
        """Read its address once. Raises `NoServerError` for one that nothing can be sent to."""
        if len(self._starts) >= _MAX_STARTS:
            self._starts.clear()
        base_url = server.base_url or ""
        self._starts[base_url] = self._start_line(base_url, b"")

    def _start_line(self, base_url: str, query: bytes) -> bytes:
        place = self._places.of(base_url)
        parts = (place.prefix, self._path, query, place.host_line)
        return b"POST %b%b%b HTTP/1.1\r\n%b" % parts


def role_refusal(error: PhalanxError, fields: bytes = b"") -> Refusal:
    """A role's own words, in the form that its direct clients know too."""
    if isinstance(error, RoleNotReadyError) and not fields and error.model is not None:
        fields = label(error.model)
    return Refusal(
        status=refusal_status(error),
        code="",
        message=str(error),
        retry_after_s=error.retry_after_s if isinstance(error, NoServerError) else 0,
        fields=fields,
        body=refusal_body(error),
    )


def label(model: str) -> bytes:
    """Says in an answer's head which model gave it."""
    if not (model.isascii() and model.isprintable()):
        return b""
    return b"\r\n%b: %b" % (INFERENCE_MODEL, model.encode())
