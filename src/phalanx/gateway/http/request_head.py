"""How a client's request is put to a backend: its head."""

from __future__ import annotations

from phalanx.gateway.http.fields import HOP_BY_HOP, OWN
from phalanx.gateway.http.incoming_request import Bytes, IncomingRequest
from phalanx.routing.snapshot import Server

_DROPPED = HOP_BY_HOP | OWN
_DROPPED_WITH_KEY = _DROPPED | {b"authorization"}


def request_head(
    request: IncomingRequest, request_id: bytes, server: Server, *, with_key: bool
) -> list[Bytes]:
    """`with_key`: the caller's authorization goes on too."""
    dropped = _DROPPED if with_key else _DROPPED_WITH_KEY
    out: list[Bytes] = [request.onward(dropped), b"x-request-id: ", request_id]
    out.append(b"\r\nvia: 1.1 phalanx\r\n")
    if not request.http11 and request.get(b"host") is None:
        out.append(b"host: %b\r\n" % server.endpoint.authority.encode())
    if request.upgrade:
        out.append(b"connection: Upgrade\r\nupgrade: websocket\r\n")
    if request.chunked:
        out.append(b"transfer-encoding: chunked\r\n")
    out.append(b"\r\n")
    return out
