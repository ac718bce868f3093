"""What one side of a connection gets: each frame is checked, counted, and given to whom it is for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from phalanx.gateway.http2 import frames
from phalanx.gateway.http2.allowance import Allowance
from phalanx.gateway.http2.frame_reader import FrameReader
from phalanx.gateway.http2.frames import (
    ACK,
    CONTINUATION,
    GOAWAY,
    HEADERS,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    SETTINGS_ACK,
    WINDOW_UPDATE,
    ConnectionFault,
    ErrorCode,
    StreamFault,
)
from phalanx.gateway.http2.header_assembly import HeaderAssembly, HeaderBlock
from phalanx.gateway.http2.header_blocks import HeaderReader, Headers
from phalanx.gateway.http2.limits import Http2Limits
from phalanx.gateway.http2.peer_settings import PeerSettings
from phalanx.gateway.http2.stream import Stream
from phalanx.gateway.http2.streams import Streams


class InboxEvents(Protocol):
    """What concerns the connection as a whole."""

    def settled(self) -> None:
        """The peer's first settings have come."""
        ...

    def requested(self, stream_id: int, headers: Headers) -> Stream | None:
        """The peer opens a stream; None where it is not taken. Raises `ConnectionFault` where it
        may not open any.
        """
        ...

    def goodbye(self, last_id: int, code: int, words: str) -> None: ...


class Inbox:
    """`feed` takes what arrives; raises `ConnectionFault` where the connection has to end."""

    def __init__(
        self, streams: Streams, limits: Http2Limits, events: InboxEvents, *, from_server: bool
    ) -> None:
        self.peer = PeerSettings()
        self._streams, self._outbox = streams, streams.outbox
        self._events = events
        self._from_server = from_server
        self._settled = False
        self._reader = FrameReader(
            self, max_data_bytes=limits.max_frame_bytes, max_other_bytes=limits.max_header_bytes
        )
        self.feed = self._reader.feed
        self._blocks = HeaderReader(limits.max_header_bytes)
        self._assembly = HeaderAssembly(limits.max_header_bytes)
        self._allowance = Allowance(
            asyncio.get_running_loop(), limits.wasted_burst, limits.wasted_per_s
        )
        self._current: Stream | None = None
        self._frame_bytes = self._padding = 0
        self._handlers: dict[int, Callable[[int, int, bytes], None]] = {
            HEADERS: self._headers,
            PRIORITY: self._priority,
            RST_STREAM: self._reset,
            SETTINGS: self._settings,
            PUSH_PROMISE: self._push,
            PING: self._ping,
            GOAWAY: self._goaway,
            WINDOW_UPDATE: self._window,
            CONTINUATION: self._continuation,
        }

    def data_begins(self, stream_id: int, num_bytes: int) -> None:
        if not self._settled or self._assembly.open:
            self._check_order()
        stream = self._streams.known(stream_id, "DATA")
        ended = stream is not None and stream.peer_ended
        self._current = None if ended else stream
        self._frame_bytes = self._padding = num_bytes
        self._streams.arrived(self._current, num_bytes)
        if ended:
            assert stream is not None
            self._break(stream, StreamFault(ErrorCode.STREAM_CLOSED, "data after the end"))

    def data(self, piece: memoryview) -> None:
        self._padding -= len(piece)
        if self._current is not None:
            self._current.events.data(piece)

    def data_ends(self, *, last: bool) -> None:
        stream, self._current = self._current, None
        if not self._frame_bytes and not last:
            self._allowance.spend("empty frames")
        if stream is None or stream.dropped:
            return
        if self._padding:
            stream.consumed(self._padding)
        if last:
            self._streams.peer_ended(stream)

    def frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if (not self._settled or self._assembly.open) and kind not in (CONTINUATION, SETTINGS):
            self._check_order()
        handler = self._handlers.get(kind)
        if handler is None:
            self._allowance.spend("frames of unknown types")
        else:
            handler(flags, stream_id, payload)

    def _headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id % 2 == 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"HEADERS of stream {stream_id}")
        self._take_block(self._assembly.begin(flags, stream_id, payload))

    def _continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._take_block(self._assembly.go_on(flags, stream_id, payload))

    def _priority(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 5:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "PRIORITY has another length than 5")
        if not stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PRIORITY of no stream")
        self._allowance.spend("priorities")

    def _reset(self, flags: int, stream_id: int, payload: bytes) -> None:
        code = frames.number_in(payload)
        stream = self._streams.known(stream_id, "RST_STREAM")
        if not self._from_server:
            self._allowance.spend("streams that were reset")
        if stream is not None:
            self._streams.drop(stream)
            stream.events.broken(
                code,
                f"the stream was reset with {frames.name_of(code)}",
                started=code != ErrorCode.REFUSED_STREAM,
            )

    def _settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._assembly.open or stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS where they may not be")
        if flags & ACK:
            self._check_order()
            if payload:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "an acknowledgement with values")
            self._blocks.without_table()
            return
        self._allowance.spend("settings")
        self.peer.update(payload, from_server=self._from_server)
        self._outbox.control(SETTINGS_ACK)
        self._outbox.peer_settings(self.peer.first_window, self.peer.max_frame_bytes)
        if not self._settled:
            self._settled = True
            self._events.settled()

    def _push(self, flags: int, stream_id: int, payload: bytes) -> None:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE, which nobody takes")

    def _ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PING of a stream")
        if len(payload) != 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "PING has another length than 8")
        if not self._outbox.take_ping():
            self._allowance.spend("pings")
        if not flags & ACK:
            self._outbox.control(frames.ping(payload, answer=True))

    def _goaway(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "GOAWAY of a stream")
        self._allowance.spend("goodbyes")
        self._events.goodbye(*frames.goaway_in(payload))

    def _window(self, flags: int, stream_id: int, payload: bytes) -> None:
        num_bytes = frames.number_in(payload)
        stream = self._streams.known(stream_id, "WINDOW_UPDATE") if stream_id else None
        try:
            self._outbox.credit(stream_id, num_bytes)
        except StreamFault as fault:
            assert stream is not None
            self._break(stream, fault)

    def _check_order(self) -> None:
        if not self._settled:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        if self._assembly.open:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a header block was not ended")

    def _take_block(self, block: HeaderBlock | None) -> None:
        if block is None:
            return
        headers = self._blocks.read(block.data)
        stream = self._streams.get(block.stream_id)
        if stream is None:
            if block.stream_id <= self._streams.last_id:
                # Sent before the peer knew that the stream is over.
                self._allowance.spend("headers of streams that are over")
                return
            self._outbox.check_read()
            stream = self._events.requested(block.stream_id, headers)
            if stream is None:
                self._allowance.spend("streams beyond those allowed")
        else:
            try:
                self._next_headers(stream, headers, last=block.last)
            except StreamFault as fault:
                self._break(stream, fault)
                return
        if stream is not None and block.last and not stream.dropped:
            self._streams.peer_ended(stream)

    def _next_headers(self, stream: Stream, headers: Headers, *, last: bool) -> None:
        if stream.peer_ended:
            raise StreamFault(ErrorCode.STREAM_CLOSED, "headers after the end")
        if not self._from_server and not last:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "trailers that are not the end")
        stream.events.headers(headers)

    def _break(self, stream: Stream, fault: StreamFault) -> None:
        """Reset a stream whose peer has done wrong: what it opens for that is not free."""
        self._allowance.spend("faults of streams")
        self._streams.reset(stream, fault.code)
        stream.events.broken(fault.code, str(fault), started=True)
