"""A client's connection: one request after another is read, answered by its work, and told in the
statistics. Pipelined requests are answered in their order.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

from phalanx.gateway.http.deadline import Deadline
from phalanx.gateway.http.fields import CONTINUE
from phalanx.gateway.http.front import Front
from phalanx.gateway.http.incoming_request import IncomingRequest
from phalanx.gateway.http.message import HttpResponse
from phalanx.gateway.http.refusal import Refusal
from phalanx.gateway.http.request_account import RequestAccount, peer_of
from phalanx.gateway.http.request_reader import RequestReader
from phalanx.gateway.http.response_head import handler_response
from phalanx.gateway.http.router import REFUSED
from phalanx.gateway.http.work import Work

_GONE = 499
"""How the statistics call a request whose client went away."""


class Connections(Protocol):
    """The server that a connection belongs to; `closing`: it takes no more requests."""

    closing: bool

    def opened(self, connection: ClientConnection) -> None: ...
    def closed(self, connection: ClientConnection) -> None: ...


class ClientConnection(asyncio.Protocol):
    """Has at most one work at a time, that of the first of the reader's waiting requests."""

    def __init__(self, front: Front, connections: Connections) -> None:
        self.transport: asyncio.Transport
        self.stays = True
        self._front = front
        self._connections = connections
        self._reader = RequestReader(front.limits, front.heads)
        self._deadline = Deadline(asyncio.get_running_loop(), self._expired)
        self._work: Work | None = None
        self._account = RequestAccount(front)
        self._advancing = False
        self._head_timed = False
        self._upload_held = False
        self._reading_held = False
        self._response_held = False
        self._lingers = False
        self._switched = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of this class and not its name.
        self.transport = cast(asyncio.Transport, transport)
        self.stays = not self._connections.closing
        self._connections.opened(self)
        self._deadline.set(self._front.limits.head_timeout_s)

    def data_received(self, data: bytes) -> None:
        if self._lingers:
            return
        reader = self._reader
        waiting = reader.waiting
        reader.feed(data)
        if (work := self._work) is None:
            if len(waiting) == 1 and waiting[0].complete:
                self._begin(waiting[0])  # as most do: nothing was before it, nor comes after it
            else:
                self._advance()
        else:
            work.arrived()
            if (refusal := waiting[0].refusal) is not None:
                self._break_off(refusal)
        if len(waiting) == 1 and waiting[0].complete and not reader.switching:
            return  # it is the backend's turn, or a handler's
        self._balance()
        self._watch()

    def connection_lost(self, error: Exception | None) -> None:
        self._deadline.close()
        self.ended()

    def pause_writing(self) -> None:
        self._response_held = True
        if self._work is not None:
            self._work.pause_response()
        self._deadline.set(self._front.limits.stall_timeout_s)

    def resume_writing(self) -> None:
        self._response_held = False
        if self._work is not None:
            self._work.resume_response()
        self._watch()

    # Caller

    @property
    def peer(self) -> str:
        return peer_of(self.transport)

    def answered(self, status: int, *, keeps: bool) -> None:
        request = self._reader.waiting.popleft()
        self._work = None
        self._account.close(status, request, self.transport)
        if self._upload_held or self._reading_held:
            self._upload_held = False
            self._balance()
        if not keeps or not self.stays:
            self._go(request)
        elif not self._advancing:
            if self._reader.waiting:
                self._advance()
            self._watch()

    def respond(self, response: HttpResponse) -> None:
        request = self._reader.waiting[0]
        keeps = request.keep_alive and request.complete and self.stays
        self.transport.write(handler_response(response, request, self._account.id, keeps=keeps))
        self.answered(response.status, keeps=keeps)

    def refuse(self, refusal: Refusal) -> None:
        self.respond(refusal.response(self._reader.waiting[0].path))

    def cut(self, status: int) -> None:
        request = self._reader.waiting.popleft()
        self._work = None
        self._account.close(status, request, self.transport)
        self.transport.abort()

    def hold_upload(self, *, held: bool) -> None:
        waiting = self._reader.waiting
        self._upload_held = held and bool(waiting) and not waiting[0].complete
        self._balance()
        if self._upload_held:
            self._deadline.clear()  # it is not the client that is slow
        else:
            self._watch()

    def switch(self) -> bytes:
        self._deadline.close()
        self._switched = True
        return self._reader.take_tail()

    def ended(self) -> None:
        """The client is gone; also called by who has taken over."""
        work, self._work = self._work, None
        if work is not None:
            work.cancel()
            status = 101 if self._switched else _GONE
            self._account.close(status, self._reader.waiting[0], self.transport)
        self._connections.closed(self)

    # The server's end.

    def leave(self) -> None:
        """Close now, or after the answers that are being given."""
        self.stays = False
        if self._work is not None:
            self._work.leave()
        elif not self._reader.waiting:
            self.transport.close()

    # Parts of it.

    def _advance(self) -> None:
        """Start the next requests' work, as far as they are there."""
        self._advancing = True
        waiting = self._reader.waiting
        while waiting and self._work is None and not self._lingers:
            request = waiting[0]
            readable = request.head_done or request.refusal is not None
            if not readable or not self._begin(request):
                break
        self._advancing = False

    def _begin(self, request: IncomingRequest) -> bool:
        """Whether the request has got its work, or its answer; else more of it has to come."""
        front = self._front
        if request.refusal is not None:
            return self._turn_away(request, request.refusal)
        known = request.known
        route = front.route(request) if known is None or known.route is None else known.route
        if isinstance(route, Refusal):
            return self._turn_away(request, route)
        if not request.complete:
            if request.awaits_continue:
                request.awaits_continue = False
                self.transport.write(CONTINUE)
            if front.needs_whole_body(route, request):
                return False
        self._account.open(request, route.kind)
        work = front.work(route, self, request, self._account.id)
        if isinstance(work, Refusal):
            self.refuse(work)
            return True
        self._work = work
        work.start()
        if self._response_held and self._work is not None:
            self._work.pause_response()
        return True

    def _turn_away(self, request: IncomingRequest, refusal: Refusal) -> bool:
        self._account.open(request, REFUSED)
        self.refuse(refusal)
        return True

    def _break_off(self, refusal: Refusal) -> None:
        """The request cannot go on; say so where nothing else was said yet."""
        request = self._reader.waiting[0]
        work, self._work = self._work, None
        self._reader.stopped = True
        if work is None:
            self._turn_away(request, refusal)
            return
        work.cancel()
        if work.begun:
            self.cut(refusal.status)
        else:
            self.refuse(refusal)

    def _go(self, request: IncomingRequest) -> None:
        """The last answer was given. A client that still sends would lose it if it were cut off, so
        what it sends is dropped for a while.
        """
        if request.complete and not self._reader.waiting:
            self.transport.close()
            return
        self._lingers = True
        self._reader.take_tail()
        self._balance()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._deadline.set(self._front.limits.linger_s)

    def _balance(self) -> None:
        """Read on, or not."""
        held = self._upload_held or self._reader.crowded
        if held is not self._reading_held and not self.transport.is_closing():
            self._reading_held = held
            if held:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def _watch(self) -> None:
        """Set the time in which the client has to do what is its turn to do."""
        if self._lingers or self._response_held or self._upload_held or self._switched:
            return
        limits = self._front.limits
        waiting = self._reader.waiting
        if not waiting:
            self._head_timed = False
            self._deadline.set(limits.idle_timeout_s)
        elif not waiting[0].head_done:
            # From its first byte on: a head that comes in drops is not given more.
            if not self._head_timed:
                self._head_timed = True
                self._deadline.set(limits.head_timeout_s)
        elif waiting[0].complete:
            self._head_timed = False
            self._deadline.clear()
        else:
            self._head_timed = False
            self._deadline.set(limits.body_timeout_s)

    def _expired(self) -> None:
        waiting = self._reader.waiting
        if self._lingers or self._response_held:
            self.transport.abort()
        elif not waiting:
            self.transport.close()
        elif waiting[0].complete:
            pass  # set before the request came; the client has nothing to do
        elif waiting[0].head_done:
            limit_s = self._front.limits.body_timeout_s
            self._break_off(_late(f"no more of the body came for {limit_s:g} s"))
        else:
            limit_s = self._front.limits.head_timeout_s
            self._break_off(_late(f"the head was not whole after {limit_s:g} s"))


def _late(message: str) -> Refusal:
    return Refusal(408, "timeout", message)
