"""How a backend's response is put to the client: its head, and how its body is framed."""

from __future__ import annotations

from typing import NamedTuple

from phalanx.gateway.http.fields import (
    HOP_BY_HOP,
    INFERENCE_MODEL,
    OWN,
    field_lines,
    named_by_connection,
    status_line,
)
from phalanx.gateway.http.incoming_request import Bytes, IncomingRequest
from phalanx.gateway.http.message import HttpResponse
from phalanx.gateway.http.upstream import Upstream

_DROPPED = HOP_BY_HOP | OWN
_DROPPED_OWN = _DROPPED | {b"content-length"}
_EVENTS = b"text/event-stream"


class ResponseHead(NamedTuple):
    """`chunked`: the body goes on in chunks. `keeps`: the connection stays for another request.
    `is_event_stream`: an event can be put after the last one.
    """

    lines: list[Bytes]
    chunked: bool
    keeps: bool
    is_event_stream: bool


def response_head(
    upstream: Upstream, request: IncomingRequest, request_id: bytes, own: bytes, *, keeps: bool
) -> ResponseHead:
    """`own` are further lines, each with a line's end in front of it, in place of the server's of
    that name. `keeps`: whether the client's connection may stay.
    """
    fields = upstream.fields
    dropped = _DROPPED
    if own:
        dropped |= {INFERENCE_MODEL}
    if b"connection" in fields:
        dropped |= named_by_connection(fields[b"connection"])
    lines: list[Bytes] = [status_line(upstream.status)]
    lines += field_lines(upstream.headers, dropped)
    if own:
        lines += (own[2:], b"\r\n")
    lines += (b"x-request-id: ", request_id, b"\r\n")
    # A client that still sends its request is answered, and then no longer listened to.
    keeps = keeps and request.keep_alive and request.complete
    has_body = request.method != "HEAD" and upstream.status not in (204, 304)
    open_ended = has_body and upstream.content_length < 0
    chunked = open_ended and request.http11
    if chunked:
        lines.append(b"transfer-encoding: chunked\r\n")
    elif open_ended:
        keeps = False
    if not keeps:
        lines.append(b"connection: close\r\n")
    elif not request.http11:
        lines.append(b"connection: keep-alive\r\n")
    lines.append(b"\r\n")
    events = open_ended and _is_event_stream(fields)
    return ResponseHead(lines, chunked, keeps, events)


def switch_head(upstream: Upstream, request_id: bytes, tail: bytes) -> bytes:
    """The backend has changed the protocol; `tail` are its first bytes of the other one."""
    lines = field_lines(upstream.headers, _DROPPED)
    end = b"connection: Upgrade\r\nupgrade: websocket\r\n\r\n"
    return b"".join([status_line(101), *lines, b"x-request-id: ", request_id, b"\r\n", end, tail])


def handler_response(
    response: HttpResponse, request: IncomingRequest, request_id: bytes, *, keeps: bool
) -> bytes:
    """A whole response that the gateway itself gives."""
    lines = [status_line(response.status), *field_lines(response.headers.raw, _DROPPED_OWN)]
    if response.status >= 200 and response.status not in (204, 304):
        lines.append(b"content-length: %d\r\n" % len(response.body))
    lines += (b"x-request-id: ", request_id, b"\r\n")
    if not keeps:
        lines.append(b"connection: close\r\n")
    elif not request.http11:
        lines.append(b"connection: keep-alive\r\n")
    lines.append(b"\r\n")
    if request.method != "HEAD":
        lines.append(response.body)
    return b"".join(lines)


def _is_event_stream(fields: dict[bytes, bytes]) -> bool:
    content_type = fields.get(b"content-type", b"")
    return content_type[: len(_EVENTS)].lower() == _EVENTS and b"content-encoding" not in fields
