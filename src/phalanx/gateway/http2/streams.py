"""The open streams of a connection, and how much its peer may send on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from phalanx.gateway.http2 import frames
from phalanx.gateway.http2.frames import MAX_WINDOW, ConnectionFault, ErrorCode
from phalanx.gateway.http2.limits import Http2Limits
from phalanx.gateway.http2.outbox import Outbox
from phalanx.gateway.http2.stream import Stream

_LAST_ID = MAX_WINDOW - 1024
"""Of a connection's streams; after them another connection is made."""


class Streams:
    """Streams leave when both of their sides have ended, or one of them has reset them; `idle` is
    called when the last has left.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        limits: Http2Limits,
        idle: Callable[[], None],
        *,
        server: bool,
    ) -> None:
        self.outbox = Outbox(transport, limits, self)
        self.last_id = 0
        """The newest stream, whether it is open or not."""
        self._limits = limits
        self._idle = idle
        self._server = server
        self._open: dict[int, Stream] = {}
        self._window = limits.window_bytes
        self._owed = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def exhausted(self) -> bool:
        return self.last_id >= _LAST_ID

    def new(self, stream_id: int) -> Stream:
        self.last_id = stream_id
        stream = Stream(stream_id, self, self._limits.stream_window_bytes)
        self._open[stream_id] = stream
        return stream

    def get(self, stream_id: int) -> Stream | None:
        return self._open.get(stream_id)

    def known(self, stream_id: int, kind: str) -> Stream | None:
        """The stream; None where it is over. A frame of one that was never opened is a fault."""
        stream = self._open.get(stream_id)
        if stream is None and (stream_id > self.last_id or stream_id % 2 == 0):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"{kind} of stream {stream_id}")
        return stream

    def arrived(self, stream: Stream | None, num_bytes: int) -> None:
        """Data of `stream` begins; None: of one that is over. Raises `ConnectionFault` where its
        peer had no room for it.
        """
        if num_bytes > self._window:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "more data than the window")
        self._window -= num_bytes
        if stream is None:
            self._credit(num_bytes)
        elif num_bytes > stream.window:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "more data than a stream's window")
        else:
            stream.window -= num_bytes
            stream.held += num_bytes

    def consumed(self, stream: Stream, num_bytes: int) -> None:
        stream.held -= num_bytes
        stream.owed += num_bytes
        if stream.owed * 2 >= self._limits.stream_window_bytes and not stream.peer_ended:
            self.outbox.write((frames.window_update(stream.stream_id, stream.owed),))
            stream.window += stream.owed
            stream.owed = 0
        self._credit(num_bytes)

    def peer_ended(self, stream: Stream) -> None:
        """The peer sends no more of it."""
        stream.peer_ended = True
        stream.events.ended()
        if stream.ended and not stream.dropped:
            self.drop(stream)

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        self.outbox.write((frames.rst_stream(stream.stream_id, code),))
        self.drop(stream)

    def drop(self, stream: Stream) -> None:
        """It is over: nothing of it is sent, and what arrives is passed over."""
        stream.dropped = True
        self._open.pop(stream.stream_id, None)
        self.outbox.forget(stream.stream_id)
        if stream.held:
            self._credit(stream.held)
            stream.held = 0
        if not self._open:
            self._idle()

    def break_off(self, code: int | None, words: str, *, after: int = 0, started: bool) -> None:
        """End those of later ids than `after`, and tell their owners."""
        for stream in [each for key, each in self._open.items() if key > after]:
            if not stream.dropped:
                self.drop(stream)
                stream.events.broken(code, words, started=started)

    # What the outbox says.

    def sent(self, stream_id: int) -> None:
        stream = self._open.get(stream_id)
        if stream is None:
            return
        if stream.peer_ended:
            self.drop(stream)
        elif self._server:
            # The answer is whole: the client need not send the rest of what it asked.
            self.reset(stream, ErrorCode.NO_ERROR)

    def stalled(self, stream_id: int) -> None:
        stream = self._open.get(stream_id)
        if stream is not None:
            self.reset(stream, ErrorCode.CANCEL)
            words = "the other side took nothing of it for too long"
            stream.events.broken(ErrorCode.CANCEL, words, started=True)

    def _credit(self, num_bytes: int) -> None:
        self._owed += num_bytes
        if self._owed * 2 >= self._limits.window_bytes:
            self.outbox.write((frames.window_update(0, self._owed),))
            self._window += self._owed
            self._owed = 0
