"""Makes the works of a role's relayed paths: an exchange with an engine, or a judge's answer."""

from __future__ import annotations

import msgspec

from phalanx.errors import PhalanxError
from phalanx.gateway.http.exchange import Exchange
from phalanx.gateway.http.handling import Handling, request_for
from phalanx.gateway.http.incoming_request import IncomingRequest
from phalanx.gateway.http.refusal import Refusal
from phalanx.gateway.http.upstream_pool import UpstreamPool
from phalanx.gateway.http.work import Answerer, Work
from phalanx.gateway.roles.judge import Judge
from phalanx.gateway.roles.routing_fields import MessageFields, RoutingFields, read_fields
from phalanx.gateway.roles.servers import RoleServers
from phalanx.gateway.roles.way import RoleWay, RoleWish, role_refusal
from phalanx.routing.roles.affinity import AFFINITY_HEADER

_AFFINITY = AFFINITY_HEADER.encode()
_NO_MESSAGES = (msgspec.UNSET, msgspec.Raw(b"null"))
_routing_fields = msgspec.json.Decoder(RoutingFields)
_message_fields = msgspec.json.Decoder(MessageFields)


class RoleRelay:
    """Of one kind of request; `judge` answers those that bring messages, where the role has one."""

    def __init__(
        self,
        way: RoleWay,
        servers: RoleServers,
        upstreams: UpstreamPool,
        judge: Judge | None = None,
    ) -> None:
        self._way = way
        self._servers = servers
        self._upstreams = upstreams
        self._judge = judge

    def needs_whole_body(self, request: IncomingRequest) -> bool:
        return True

    def work(self, caller: Answerer, request: IncomingRequest, request_id: bytes) -> Work | Refusal:
        parts = request.parts
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        if not isinstance(body, bytes):
            body = bytes(body)
        fields: RoutingFields
        try:
            if self._judge is None:
                fields = read_fields(_routing_fields, body)
            else:
                fields = asked = read_fields(_message_fields, body)
                if asked.messages not in _NO_MESSAGES:
                    given = request_for(request, request_id.decode(), caller.peer, {})
                    return Handling(caller, self._judge.answer, given)
        except PhalanxError as error:
            return role_refusal(error)
        request.parts = []
        affinity = self._affinity(request) if self._servers.by_affinity else None
        wish = RoleWish(body, fields, affinity)
        return Exchange(self._way, wish, self._upstreams, caller, request, request_id)

    def close(self) -> None:
        self._upstreams.close()

    def _affinity(self, request: IncomingRequest) -> str | None:
        key = request.get(_AFFINITY)
        return key.decode("latin-1") if key else None
