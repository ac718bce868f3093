"""How a client's request is put to a backend: its head."""

from __future__ import annotations

from phalanx.gateway.http.fields import HOP_BY_HOP, OWN
from phalanx.gateway.http.incoming_request import Bytes, IncomingRequest

DROPPED = HOP_BY_HOP | OWN
DROPPED_WITH_KEY = DROPPED | {b"authorization"}
VIA = b"\r\nvia: 1.1 phalanx\r\n"
PLAIN_REQUEST = b"%b%bcontent-length: %d\r\nx-request-id: %b\r\nvia: 1.1 phalanx\r\n\r\n%b"
"""Of one that came whole: its first line, fields, length, id and body."""


def request_head(
    request: IncomingRequest, request_id: bytes, dropped: frozenset[bytes], authority: str
) -> list[Bytes]:
    """Without the fields that are dropped; `authority` is the backend's, for a client that names
    none.
    """
    out: list[Bytes] = [request.start, request.onward(dropped)]
    if request.known is not None and request.content_length >= 0:
        out.append(b"content-length: %d\r\nx-request-id: " % request.content_length)
    else:
        out.append(b"x-request-id: ")
    out += (request_id, VIA)
    if not request.http11 and request.get(b"host") is None:
        out.append(b"host: %b\r\n" % authority.encode())
    if request.upgrade:
        out.append(b"connection: Upgrade\r\nupgrade: websocket\r\n")
    if request.chunked:
        out.append(b"transfer-encoding: chunked\r\n")
    out.append(b"\r\n")
    return out
