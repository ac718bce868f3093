"""One HTTP/2 connection, either side of it: how it begins, lasts and ends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol, cast

from phalanx.gateway.http2 import frames
from phalanx.gateway.http2.frames import (
    FIRST_WINDOW,
    PREFACE,
    ConnectionFault,
    ErrorCode,
    Setting,
    StreamFault,
)
from phalanx.gateway.http2.header_blocks import Headers
from phalanx.gateway.http2.inbox import Inbox
from phalanx.gateway.http2.keepalive import Keepalive
from phalanx.gateway.http2.limits import Http2Limits
from phalanx.gateway.http2.read_buffer import ReadBuffer
from phalanx.gateway.http2.stream import Stream, StreamEvents
from phalanx.gateway.http2.streams import Streams

_PING = b"phalanx?"
_WRITE_HIGH_BYTES, _WRITE_LOW_BYTES = 512 * 1024, 128 * 1024


class Owner(Protocol):
    """Whoever has the connection."""

    def made(self, transport: asyncio.Transport) -> None: ...

    def ready(self) -> None:
        """The peer's settings have come."""
        ...

    def request(self, stream: Stream, headers: Headers) -> StreamEvents:
        """A client has opened a stream; returns who takes it. Raises `StreamFault` where the client
        may not have.
        """
        ...

    def leaving(self) -> None:
        """The peer takes no more streams."""
        ...

    def lost(self, words: str) -> None:
        """The connection is over, and its streams were told."""
        ...


@dataclass(frozen=True)
class Role:
    """What differs between the sides. A peer that says nothing for `quiet_s` is asked whether it is
    there, and has `answer_s` to say so; one without streams only with `idle_pings`.
    """

    client: bool
    quiet_s: float
    answer_s: float
    idle_pings: bool


class Connection(asyncio.BufferedProtocol):
    """Belongs to the event loop that it was made on, as `reading` does."""

    streams: Streams
    """From `Owner.made` on, as are the private parts below."""

    def __init__(self, role: Role, limits: Http2Limits, owner: Owner, reading: ReadBuffer) -> None:
        self.leaving = False
        self._role, self._limits, self._owner = role, limits, owner
        self._reading = reading
        self._over = False
        self._said_all = False
        self._ready = False
        self._last_told: int | None = None
        self._preface_left = b"" if role.client else PREFACE

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = made = cast(asyncio.Transport, transport)
        made.set_write_buffer_limits(high=_WRITE_HIGH_BYTES, low=_WRITE_LOW_BYTES)
        limits, role = self._limits, self._role
        self.streams = Streams(made, limits, self._close_if_done, server=not role.client)
        self._inbox = Inbox(self.streams, limits, self, from_server=role.client)
        self._keepalive = Keepalive(
            role.quiet_s,
            role.answer_s,
            wanted=lambda: role.idle_pings or len(self.streams) > 0,
            ping=lambda: self.streams.outbox.write((frames.ping(_PING),)),
            lost=lambda: self.abort("nothing is heard of the other side any more"),
        )
        self._greeting = asyncio.get_running_loop().call_later(
            limits.greeting_timeout_s, self.abort, "the other side has not said what it takes"
        )
        settings = dict(limits.settings)
        if role.client:
            settings[Setting.ENABLE_PUSH] = 0
        else:
            settings[Setting.MAX_CONCURRENT_STREAMS] = limits.max_streams
        made.write(
            (PREFACE if role.client else b"")
            + frames.settings(settings)
            + frames.window_update(0, limits.window_bytes - FIRST_WINDOW)
        )
        self._owner.made(made)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reading.room()

    def buffer_updated(self, nbytes: int) -> None:
        data = self._reading.taken(nbytes)
        if self._over or self._said_all:
            return
        self._keepalive.heard()
        try:
            if self._preface_left:
                data = self._without_preface(data)
            self._inbox.feed(data)
        except ConnectionFault as fault:
            self._fail(fault)

    def connection_lost(self, error: Exception | None) -> None:
        self._end("the connection was lost")

    def pause_writing(self) -> None:
        self.streams.outbox.pause()

    def resume_writing(self) -> None:
        self.streams.outbox.resume()

    # What the owner calls.

    @property
    def can_open(self) -> bool:
        """Whether a client may open one more stream."""
        if not self._ready or self.leaving or self._over or self.streams.exhausted:
            return False
        return len(self.streams) < self._inbox.peer.max_streams

    def open(self, events: StreamEvents) -> Stream:
        """A client's next stream, where `can_open`."""
        assert self._role.client and self.can_open
        stream = self.streams.new(self.streams.last_id + 2 if self.streams.last_id else 1)
        stream.events = events
        return stream

    def leave(self) -> None:
        """Take no more streams, and close when those that run have ended."""
        if self._over or self.leaving:
            return
        self.leaving = True
        self._goodbye(ErrorCode.NO_ERROR)
        self._close_if_done()

    def abort(self, words: str = "the connection was closed") -> None:
        """End it at once, and all of its streams."""
        self._transport.abort()
        self._end(words)

    # What the inbox calls.

    def settled(self) -> None:
        self._ready = True
        self._greeting.cancel()
        self._owner.ready()

    def requested(self, stream_id: int, headers: Headers) -> Stream | None:
        if self._role.client:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a server opened a stream")
        if self.leaving or len(self.streams) >= self._limits.max_streams:
            self.streams.last_id = stream_id
            refused = frames.rst_stream(stream_id, ErrorCode.REFUSED_STREAM)
            self.streams.outbox.write((refused,))
            return None
        stream = self.streams.new(stream_id)
        try:
            stream.events = self._owner.request(stream, headers)
        except StreamFault as fault:
            stream.reset(fault.code)
        return stream

    def goodbye(self, last_id: int, code: int, words: str) -> None:
        self.leaving = True
        if self._role.client:
            words = f"the server closes the connection: {words or frames.name_of(code)}"
            self.streams.break_off(code, words, after=last_id, started=False)
        self._owner.leaving()
        self._close_if_done()

    def _without_preface(self, data: memoryview) -> memoryview:
        wanted = self._preface_left[: len(data)]
        if data[: len(wanted)] != wanted:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "this is not HTTP/2")
        self._preface_left = self._preface_left[len(wanted) :]
        return data[len(wanted) :]

    def _close_if_done(self) -> None:
        if self.leaving and not (self._over or self._said_all or len(self.streams)):
            self._said_all = True
            self._keepalive.close()
            self._greeting.cancel()
            self._close(half=not self._role.client)

    def _close(self, *, half: bool = False) -> None:
        """Let what was written be read, for a while. A client that still sends, if only windows,
        would lose it by a close: `half` waits for its own, and drops what comes until then.
        """
        self.streams.outbox.finish()
        if half and self._transport.can_write_eof():
            try:
                self._transport.write_eof()
            except OSError:  # the client has broken the connection, which is not yet told
                self._transport.abort()
        else:
            self._transport.close()
        asyncio.get_running_loop().call_later(self._limits.linger_s, self._transport.abort)

    def _goodbye(self, code: ErrorCode, words: str = "") -> None:
        """Tell which streams were looked at; of those after them none was, then or later."""
        if self._last_told is None:
            self._last_told = 0 if self._role.client else self.streams.last_id
        self.streams.outbox.write((frames.goaway(self._last_told, code, words),))

    def _fail(self, fault: ConnectionFault) -> None:
        if not self._over:
            self._goodbye(fault.code, str(fault))
            self._close()
            self._end(str(fault))

    def _end(self, words: str) -> None:
        if self._over:
            return
        self._over = True
        self._keepalive.close()
        self._greeting.cancel()
        self.streams.break_off(None, words, started=True)
        self.streams.outbox.close()
        self._owner.lost(words)
