"""One relayed request: from the choice of a server to the last byte of its response, or to the
ending that it has instead.

The ticket is released once, in `_finish` or in `_end`, one of which every ending passes. A request of which a byte was
written to a backend is never sent again.
"""

from __future__ import annotations

import asyncio
import os
from http import HTTPStatus
from typing import Generic, TypeVar

from phalanx.errors import NoServerError, PhalanxError
from phalanx.gateway.http.fields import (
    HOP_BY_HOP,
    OWN,
    Pair,
    field_lines,
    status_line,
)
from phalanx.gateway.http.incoming_request import Bytes, IncomingRequest
from phalanx.gateway.http.refusal import Refusal
from phalanx.gateway.http.response_body import ResponseBody
from phalanx.gateway.http.response_head import response_head, switch_head
from phalanx.gateway.http.tunnel import Tunnel
from phalanx.gateway.http.upstream import Upstream
from phalanx.gateway.http.upstream_pool import UpstreamPool
from phalanx.gateway.http.way import NOBODY, ServerT, Way
from phalanx.gateway.http.work import Caller
from phalanx.routing.load import Ticket

WishT = TypeVar("WishT")
_DROPPED = HOP_BY_HOP | OWN
_ID = b"\r\nx-request-id: "
_KEPT = b"\r\n\r\n"
_KEPT_1_0 = b"\r\nconnection: keep-alive\r\n\r\n"
_CLOSED = b"\r\nconnection: close\r\n\r\n"
_CODES = {status.value: str(status.value) for status in HTTPStatus}
_JOINED = 64 * 1024
"""Up to this size a write is put together, so that it is one call to the system."""
_ATTEMPTS = 2


class Exchange(Generic[WishT, ServerT]):
    """Fed by both connections; writes to both."""

    def __init__(
        self,
        way: Way[WishT, ServerT],
        wish: WishT,
        upstreams: UpstreamPool,
        caller: Caller,
        request: IncomingRequest,
        request_id: bytes,
    ) -> None:
        self._way = way
        self._wish = wish
        self._upstreams = upstreams
        self._caller = caller
        self._request = request
        self._id = request_id
        self._ticket: Ticket[ServerT] | None = None
        self._upstream: Upstream | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._body: ResponseBody | None = None
        self._tunnel: Tunnel | None = None
        self._held = self._sent_whole = self._keeps = False
        self._status = 0

    @property
    def begun(self) -> bool:
        return self._status != 0

    def start(self) -> None:
        """Choose a server and send what there is of the request."""
        way = self._way
        try:
            ticket = self._ticket = way.acquire(self._wish, NOBODY)
        except PhalanxError as error:
            self._caller.refuse(way.refusal(self._wish, error))
            return
        upstream = self._upstreams.idle(way.key(ticket.server))
        if upstream is not None:
            self._send(ticket, upstream)
        else:
            self._caller.hold_upload(held=True)
            self._connecting = asyncio.get_running_loop().create_task(self._connect(ticket))

    # From the client.

    def arrived(self) -> None:
        """There is more of the request's body."""
        upstream, request = self._upstream, self._request
        if upstream is None or self._sent_whole or not (request.parts or request.complete):
            return
        self._sent_whole = request.complete
        for part in request.framed():
            upstream.transport.write(part)

    def cancel(self) -> None:
        """Nobody waits for the response any more."""
        self._end()
        if self._tunnel is not None:
            self._tunnel.abort()

    def leave(self) -> None:
        """A tunnel has no end of its own that could be waited for."""
        if self._tunnel is not None:
            self._tunnel.close()

    def pause_response(self) -> None:
        self._held = True
        if self._upstream is not None:
            self._upstream.transport.pause_reading()

    def resume_response(self) -> None:
        self._held = False
        if self._upstream is not None:
            self._upstream.transport.resume_reading()

    # From the backend.

    def pause_upload(self) -> None:
        self._caller.hold_upload(held=True)

    def resume_upload(self) -> None:
        self._caller.hold_upload(held=False)

    def interim(self, status: int, headers: list[Pair]) -> None:
        if status != 100 and self._request.http11:
            lines = field_lines(headers, _DROPPED)
            self._caller.transport.write(b"".join([status_line(status), *lines, b"\r\n"]))

    def response(self, upstream: Upstream) -> None:
        out: list[Bytes] = []
        body = self._body
        if body is None:
            body = self._begin_response(upstream, out)
        out += body.next(upstream.take(), complete=upstream.complete)
        _write(self._caller.transport, out)
        if upstream.complete:
            self._finish(upstream, upstream.reusable)
        else:
            upstream.expect_more(self._upstreams.limits.response_timeout_s)

    def whole_response(self, upstream: Upstream, status: int, lines: bytes, body: bytes) -> None:
        request, caller = self._request, self._caller
        self._status = status
        keeps = self._keeps = request.keep_alive and request.complete and caller.stays
        end = _CLOSED
        if keeps:
            end = _KEPT if request.http11 else _KEPT_1_0
        fields = self._way.answer_fields(self._wish)
        caller.transport.write(b"".join((lines, fields, _ID, self._id, end, body)))
        self._finish(upstream, True)

    def switched(self, tail: bytes) -> None:
        """The backend speaks another protocol from here on."""
        upstream, ticket = self._upstream, self._ticket
        assert upstream is not None and ticket is not None
        if not self._request.upgrade:
            self._fail(502, "changed the protocol without being asked to")
            return
        upstream.detach()
        self._ticket = self._upstream = None
        self._status = 101
        caller = self._caller
        caller.transport.write(switch_head(upstream, self._id, tail))
        self._tunnel = Tunnel(caller.transport, upstream.transport, ticket, caller.ended)
        self._tunnel.open(caller.switch())

    def broken(self, why: str) -> None:
        self._fail(502, why)

    def late(self) -> None:
        limit = self._upstreams.limits.response_timeout_s
        self._fail(504, f"has sent nothing for {limit:g} s")

    # Parts of it.

    async def _connect(self, first: Ticket[ServerT]) -> None:
        """Open a connection; where that fails nothing has started, and one other may be tried."""
        way = self._way
        ticket: Ticket[ServerT] | None = first
        tried = NOBODY
        why = ""
        for _ in range(_ATTEMPTS):
            try:
                if ticket is None:
                    ticket = self._ticket = way.acquire(self._wish, tried)
                upstream = await self._upstreams.connect(way.place(ticket.server))
            except OSError as error:
                assert ticket is not None
                self._ticket = None
                why = os.strerror(error.errno) if error.errno else "no answer in time"
                tried |= {ticket.server.server_id}
                ticket.outcome("503", message=why)
                ticket.release()
                way.unreachable(ticket.server, why)
                ticket = None
            except PhalanxError as error:
                self._connecting = None
                if why and isinstance(error, NoServerError):
                    error = _unreached(why, error.retry_after_s)
                self._refuse(way.refusal(self._wish, error))
                return
            else:
                self._connecting = None
                self._caller.hold_upload(held=False)
                self._send(ticket, upstream)
                return
        self._connecting = None
        self._refuse(way.refusal(self._wish, _unreached(why)))

    def _send(self, ticket: Ticket[ServerT], upstream: Upstream) -> None:
        self._upstream = upstream
        request = self._request
        try:
            out = self._way.message(self._wish, request, self._id, ticket.server)
        except PhalanxError as error:
            refusal = self._way.refusal(self._wish, error)
            ticket.outcome(str(refusal.status), message=refusal.message)
            self._refuse(refusal)
            return
        self._sent_whole = request.complete
        within_s = self._upstreams.limits.response_timeout_s
        upstream.carry(self, without_body=request.method == "HEAD", within_s=within_s)
        if len(out) == 1:
            upstream.transport.write(out[0])
        else:
            _write(upstream.transport, out)
        if self._held:
            upstream.transport.pause_reading()

    def _begin_response(self, upstream: Upstream, out: list[Bytes]) -> ResponseBody:
        fields = self._way.answer_fields(self._wish)
        head = response_head(upstream, self._request, self._id, fields, keeps=self._caller.stays)
        self._status = upstream.status
        self._keeps = head.keeps
        out += head.lines
        self._body = ResponseBody(chunked=head.chunked, is_event_stream=head.is_event_stream)
        return self._body

    def _finish(self, upstream: Upstream, reusable: bool) -> None:
        """The response is whole."""
        if reusable and self._request.complete:
            self._upstream = None
            if self._held:
                upstream.transport.resume_reading()  # for whose turn is next
            self._upstreams.put(upstream)
        ticket, self._ticket = self._ticket, None
        assert ticket is not None
        ticket.code = _CODES.get(self._status) or str(self._status)
        ticket.release()
        if self._upstream is not None:
            self._end()
        self._caller.answered(self._status, keeps=self._keeps)

    def _fail(self, status: int, why: str) -> None:
        """The backend gives no response, or not the rest of it."""
        ticket = self._ticket
        assert ticket is not None
        what = f"{self._way.place(ticket.server).title} {why}"
        ticket.outcome(str(status), message=why)
        code = "timeout" if status == 504 else "bad_gateway"
        if self._status == 0:
            message = f"{what}; the request may have been started, so it was not sent again"
            self._refuse(Refusal(status, code, message, fields=self._way.answer_fields(self._wish)))
            return
        self._end()
        refusal = Refusal(status, code, f"the stream broke off: {what}")
        last = None if self._body is None else self._body.broken_off(refusal, self._request.path)
        if last is None:
            self._caller.cut(self._status)
        else:
            _write(self._caller.transport, last)
            self._caller.answered(self._status, keeps=False)

    def _refuse(self, refusal: Refusal) -> None:
        self._end()
        self._caller.refuse(refusal)

    def _end(self) -> None:
        """Every ending passes here but that of a connection which stays; once or more."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            ticket.release()
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.abort()
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()


def _unreached(why: str, retry_after_s: int = 1) -> NoServerError:
    return NoServerError(
        f"no server could be reached ({why}); the request was not started",
        retry_after_s=retry_after_s,
    )


def _write(transport: asyncio.Transport, parts: list[Bytes]) -> None:
    """In one call to the system where that costs no copy of a large body."""
    if len(parts) == 1:
        transport.write(parts[0])
    elif sum(map(len, parts)) <= _JOINED:
        transport.write(b"".join(parts))
    else:
        for part in parts:
            transport.write(part)
