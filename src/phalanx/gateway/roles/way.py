"""How a role's request finds its engine, and what that engine is sent."""

from __future__ import annotations

import enum

import msgspec

from phalanx.errors import NoServerError, PhalanxError, RoleNotReadyError
from phalanx.gateway.http.fields import INFERENCE_MODEL
from phalanx.gateway.http.incoming_request import Bytes, IncomingRequest
from phalanx.gateway.http.refusal import Refusal
from phalanx.gateway.http.request_head import DROPPED, DROPPED_WITH_KEY, VIA
from phalanx.gateway.http.way import Place
from phalanx.gateway.roles.places import RolePlaces
from phalanx.gateway.roles.routing_fields import RoutingFields, for_chat, for_generate
from phalanx.gateway.roles.servers import RoleServers
from phalanx.routing.load import Ticket
from phalanx.routing.roles.balancer import RoleServer
from phalanx.routing.roles.resolver import RoleSelector
from phalanx.routing.roles.snapshot import RoleModel
from phalanx.wire.discovery import refusal_body, refusal_status

_OWN = frozenset({b"host", b"content-length"})


class Kind(enum.Enum):
    """What an engine is asked; the value is its path there."""

    GENERATE = b"/generate"
    CHAT = b"/v1/chat/completions"


class RoleWish:
    """One request: its body, and what that says of where it goes. `model` is known once one of its
    servers was chosen.
    """

    __slots__ = ("affinity", "body", "fields", "model", "selector")

    def __init__(self, body: bytes, fields: RoutingFields, affinity: str | None) -> None:
        self.body = body
        self.fields = fields
        self.selector = selector_of(fields)
        self.affinity = affinity
        self.model: RoleModel | None = None


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
        self._kind = kind
        self._servers = servers
        self._places = places
        self._dropped = _OWN | (DROPPED if passes_authorization else DROPPED_WITH_KEY)
        self._starts: dict[str, bytes] = {}

    def acquire(self, wish: RoleWish, tried: frozenset[str]) -> Ticket[RoleServer]:
        wish.model, ticket = self._servers.acquire(wish.selector, wish.affinity, tried)
        try:
            self._places.of(ticket.server.base_url or "")
        except NoServerError as error:
            ticket.outcome("503", message=str(error))
            ticket.release()
            raise
        return ticket

    def place(self, server: RoleServer) -> Place:
        return self._places.of(server.base_url or "")

    def unreachable(self, server: RoleServer, why: str) -> None:
        self._servers.unreachable(server)

    def message(
        self, wish: RoleWish, request: IncomingRequest, request_id: bytes, server: RoleServer
    ) -> list[Bytes]:
        model = wish.model
        assert model is not None, "it was chosen"
        if self._kind is Kind.GENERATE:
            body = for_generate(wish.body, wish.fields)
        else:
            body = for_chat(wish.body, wish.fields, served_name(model))
        return [
            self._start(request, server.base_url or ""),
            request.onward(self._dropped),
            b"content-length: %d\r\nx-request-id: " % len(body),
            request_id,
            VIA,
            b"\r\n",
            body,
        ]

    def answer_fields(self, wish: RoleWish) -> bytes:
        return b"" if wish.model is None else label(wish.model.name)

    def refusal(self, wish: RoleWish, error: PhalanxError) -> Refusal:
        return role_refusal(error, self.answer_fields(wish))

    def _start(self, request: IncomingRequest, base_url: str) -> bytes:
        query = request.query
        if query:
            return self._start_line(base_url, b"?" + query.encode("latin-1"))
        start = self._starts.get(base_url)
        if start is None:
            if len(self._starts) >= 4096:
                self._starts.clear()
            start = self._starts[base_url] = self._start_line(base_url, b"")
        return start

    def _start_line(self, base_url: str, query: bytes) -> bytes:
        place = self._places.of(base_url)
        parts = (place.prefix, self._kind.value, query, place.host_line)
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


def served_name(model: RoleModel) -> bytes:
    """What its engines call it, as JSON."""
    return msgspec.json.encode(model.served_model_name or model.name)
