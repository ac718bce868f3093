"""What one side of a connection writes: frames at once, and data as the peer's windows allow."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from phalanx.gateway.http2 import frames
from phalanx.gateway.http2.frames import (
    DATA,
    END_STREAM,
    FIRST_WINDOW,
    LEAST_FRAME_BYTES,
    MAX_WINDOW,
    ConnectionFault,
    ErrorCode,
    StreamFault,
)
from phalanx.gateway.http2.header_blocks import first_on_connection
from phalanx.gateway.http2.limits import Http2Limits

Buffer = bytes | memoryview

_TURN_BYTES = 768 * 1024
"""What one stream writes before the others have their turn, and the transport is looked at. After
each write of much all that comes next is slow, so that images should go in one.
"""


class Outgoing:
    """The sending half of a stream. `closed` once all of it was written, or given up; `moved` where
    something was written since somebody looked.
    """

    __slots__ = ("_ends", "_trailers", "closed", "moved", "pieces", "stream_id", "waiter", "window")

    def __init__(self, stream_id: int, window: int) -> None:
        self.stream_id = stream_id
        self.window = window
        self.closed = False
        self.moved = True
        self.pieces: deque[Buffer] = deque()
        self.waiter: asyncio.Future[None] | None = None
        self._ends = False
        self._trailers: bytes | None = None

    @property
    def waits(self) -> bool:
        """Whether there is something left that may be written some time."""
        return bool(self.pieces) or self._ends

    def end(self, trailers: bytes | None = None) -> None:
        """After what waits: the end, with a block of trailers or without."""
        self._ends = True
        self._trailers = trailers

    def taken(self, room: int) -> tuple[list[Buffer], int]:
        """The next frame's content: as much as fits."""
        parts: list[Buffer] = []
        num_bytes, pieces = 0, self.pieces
        while pieces and num_bytes < room:
            piece = pieces[0]
            if len(piece) <= room - num_bytes:
                parts.append(pieces.popleft())
                num_bytes += len(piece)
            else:
                view, cut = memoryview(piece), room - num_bytes
                parts.append(view[:cut])
                pieces[0] = view[cut:]
                num_bytes = room
        return parts, num_bytes

    @property
    def ends_with_data(self) -> bool:
        """Whether the frame that was just taken is the last."""
        return self._ends and self._trailers is None and not self.pieces

    def finish(self) -> bytes | None:
        """All data was written: the trailers, if that is how the stream ends."""
        if not self._ends:
            return None
        self._ends = False
        self.closed = True
        return self._trailers

    def drop(self) -> None:
        """Nothing more of it is written."""
        self.closed = True
        self._ends = False
        self.pieces.clear()
        self.wake()

    def wake(self) -> None:
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class OutboxEvents(Protocol):
    def sent(self, stream_id: int) -> None:
        """The sending half of a stream has closed."""
        ...

    def stalled(self, stream_id: int) -> None:
        """Nothing of a stream was taken for too long."""
        ...


class Outbox:
    """Belongs to one connection."""

    def __init__(
        self, transport: asyncio.Transport, limits: Http2Limits, events: OutboxEvents
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._out: list[Buffer] = []
        self._max_written_bytes = limits.max_written_bytes
        self._stall_timeout_s = limits.stall_timeout_s
        self._events = events
        self._timer: asyncio.TimerHandle | None = None
        self._window = FIRST_WINDOW
        self._first_window = FIRST_WINDOW
        self._max_frame_bytes = LEAST_FRAME_BYTES
        self._streams: dict[int, Outgoing] = {}
        self._waiting: dict[int, Outgoing] = {}
        self._paused = False
        self._greeted = False
        self._finished = False
        self._data_bytes = 0
        self._pings_due = 0

    def control(self, frame: bytes) -> None:
        """Write a frame that no window holds back; a peer that does not read them is given up."""
        self.check_read()
        self.write((frame,))

    def check_read(self) -> None:
        """Raises `ConnectionFault` where the peer asks for more and leaves too much unread."""
        if self._transport.get_write_buffer_size() > self._max_written_bytes:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "the peer asks and does not read")

    def take_ping(self) -> bool:
        """Whether a ping of the peer is due to data that it got: some measure the line with one for
        each frame.
        """
        due = self._pings_due > 0
        self._pings_due -= due
        return due

    def write(self, parts: Iterable[Buffer]) -> None:
        """Write these, together with what else is written in this turn of the event loop."""
        if not self._out:
            self._loop.call_soon(self.write_out)
        self._out.extend(parts)

    def write_out(self) -> None:
        """Write now what this turn has gathered."""
        out, self._out = self._out, []
        self._data_bytes = 0
        if out and not (self._finished or self._transport.is_closing()):
            self._transport.writelines(out)

    def finish(self) -> None:
        """As `write_out`, for the last time: what is written later is dropped."""
        self.write_out()
        self._finished = True

    def open(self, stream_id: int) -> Outgoing:
        outgoing = self._streams[stream_id] = Outgoing(stream_id, self._first_window)
        return outgoing

    def forget(self, stream_id: int) -> None:
        outgoing = self._streams.pop(stream_id, None)
        self._waiting.pop(stream_id, None)
        if outgoing is not None:
            outgoing.drop()

    def headers(self, stream_id: int, block: bytes, *, last: bool = False) -> None:
        """Write a block, which nothing of the stream may wait before; `last`: nor come after."""
        if not self._greeted:
            self._greeted = True
            block = first_on_connection(block)
        self.write((frames.headers(stream_id, block, self._max_frame_bytes, last=last),))
        if last:
            self._events.sent(stream_id)

    def flush(self, outgoing: Outgoing) -> None:
        """Write what a stream has to write, as far as it may."""
        if not self._paused and outgoing.waits and not self._write_turns(outgoing):
            return
        if outgoing.waits:
            self._waiting[outgoing.stream_id] = outgoing
            self._watch()

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._flush_waiting()

    def credit(self, stream_id: int, num_bytes: int) -> None:
        """The peer takes so many more bytes, of one stream or (0) of all together."""
        if num_bytes == 0:
            if stream_id in self._streams:
                raise StreamFault(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")
            if stream_id == 0:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")
            return
        if stream_id == 0:
            self._window += num_bytes
            if self._window > MAX_WINDOW:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "the window is too large")
            self._flush_waiting()
            return
        outgoing = self._streams.get(stream_id)
        if outgoing is None:
            return
        outgoing.window += num_bytes
        if outgoing.window > MAX_WINDOW:
            raise StreamFault(ErrorCode.FLOW_CONTROL_ERROR, "the stream's window is too large")
        if stream_id in self._waiting and not self._write_turns(outgoing):
            self._waiting.pop(stream_id, None)

    def peer_settings(self, first_window: int, max_frame_bytes: int) -> None:
        """The peer has changed what it takes; streams that are open are told too."""
        self._max_frame_bytes = min(max_frame_bytes, _TURN_BYTES)
        change = first_window - self._first_window
        self._first_window = first_window
        if not change:
            return
        for outgoing in self._streams.values():
            outgoing.window += change
            if outgoing.window > MAX_WINDOW:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "a window became too large")
        if change > 0:
            self._flush_waiting()

    def close(self) -> None:
        """Nothing is written any more."""
        for outgoing in list(self._streams.values()):
            outgoing.drop()
        self._streams.clear()
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _watch(self) -> None:
        if self._timer is None and self._stall_timeout_s < math.inf:
            self._timer = self._loop.call_later(self._stall_timeout_s, self._look)

    def _look(self) -> None:
        """Give up what has not moved since the last look."""
        self._timer = None
        for stream_id, outgoing in list(self._waiting.items()):
            if not outgoing.moved:
                self._events.stalled(stream_id)
            outgoing.moved = False
        if self._waiting:
            self._watch()

    def _flush_waiting(self) -> None:
        """A turn for each of them, until all have written what they may."""
        while self._waiting and not self._paused:
            wrote = False
            for stream_id, outgoing in list(self._waiting.items()):
                if stream_id not in self._waiting:
                    continue
                wrote |= min(self._window, outgoing.window) > 0 or not outgoing.pieces
                self._write_turn(outgoing)
                if not outgoing.waits:
                    self._waiting.pop(stream_id, None)
                if self._paused:
                    return
            if not wrote:
                return

    def _write_turns(self, outgoing: Outgoing) -> bool:
        """Returns whether something is left to write."""
        while outgoing.waits and not self._paused:
            if outgoing.pieces and min(self._window, outgoing.window) <= 0:
                return True
            self._write_turn(outgoing)
        return outgoing.waits

    def _write_turn(self, outgoing: Outgoing) -> None:
        out: list[Buffer] = []
        room = min(self._window, outgoing.window, _TURN_BYTES)
        stream_id, last = outgoing.stream_id, False
        while outgoing.pieces and room > 0:
            parts, num_bytes = outgoing.taken(min(room, self._max_frame_bytes))
            last = outgoing.ends_with_data
            out.append(frames.head(DATA, END_STREAM if last else 0, stream_id, num_bytes))
            out += parts
            room -= num_bytes
            self._window -= num_bytes
            outgoing.window -= num_bytes
            self._data_bytes += num_bytes
            self._pings_due += 1
        if not outgoing.pieces and outgoing.waits:
            trailers = outgoing.finish()
            if trailers is not None:
                block = frames.headers(stream_id, trailers, self._max_frame_bytes, last=True)
                out.append(block)
            elif not last:
                out.append(frames.head(DATA, END_STREAM, stream_id, 0))
        if out:
            outgoing.moved = True
            self.write(out)
            if self._data_bytes >= _TURN_BYTES:
                self.write_out()
        if not outgoing.pieces:
            outgoing.wake()
        if outgoing.closed:
            self._events.sent(stream_id)
