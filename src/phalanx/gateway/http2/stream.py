"""One stream of a connection, and what whoever owns it hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from phalanx.gateway.http2.frames import ErrorCode
from phalanx.gateway.http2.header_blocks import Headers
from phalanx.gateway.http2.outbox import Buffer, Outbox, Outgoing


class StreamEvents(Protocol):
    """`ended` after the last of what the peer sends. `broken` comes at most once, after which
    nothing comes and nothing is sent: `code` is None where the connection was lost, and `started`
    says whether the peer may have looked at the stream.
    """

    def headers(self, headers: Headers) -> None: ...

    def data(self, piece: memoryview) -> None: ...

    def ended(self) -> None: ...

    def broken(self, code: int | None, words: str, *, started: bool) -> None: ...


class Carrier(Protocol):
    """What a stream needs of its connection."""

    outbox: Outbox

    def consumed(self, stream: Stream, num_bytes: int) -> None: ...

    def reset(self, stream: Stream, code: ErrorCode) -> None: ...


class Nobody:
    """Hears of a stream that nobody has taken yet, or any more."""

    def headers(self, headers: Headers) -> None: ...

    def data(self, piece: memoryview) -> None: ...

    def ended(self) -> None: ...

    def broken(self, code: int | None, words: str, *, started: bool) -> None: ...


class Stream:
    """Made by the connection. Whoever owns it calls `consumed` for the data that it has let go of,
    for which the peer may then send more.

    `window` is what the peer may send, `held` what it has sent and nobody has consumed, `owed` what
    was consumed and the peer was not told of.
    """

    __slots__ = (
        "_carrier",
        "_outgoing",
        "dropped",
        "events",
        "held",
        "owed",
        "peer_ended",
        "stream_id",
        "window",
    )

    def __init__(self, stream_id: int, carrier: Carrier, window: int) -> None:
        self.stream_id = stream_id
        self.events: StreamEvents = Nobody()
        self.window = window
        self.held = self.owed = 0
        self.peer_ended = False
        self.dropped = False
        self._carrier = carrier
        self._outgoing: Outgoing = carrier.outbox.open(stream_id)

    @property
    def ended(self) -> bool:
        """Whether everything that is sent to the peer was written."""
        return self._outgoing.closed

    def headers(self, block: bytes, *, last: bool = False) -> None:
        """Send a first header block, or the only one."""
        if self._outgoing.closed:
            return
        if last:
            self._outgoing.closed = True
        self._carrier.outbox.headers(self.stream_id, block, last=last)

    def send(
        self, pieces: Iterable[Buffer], *, last: bool = False, trailers: bytes | None = None
    ) -> None:
        """Send data as the peer takes it; with `last` or `trailers`, a block, nothing follows."""
        outgoing = self._outgoing
        if outgoing.closed:
            return
        outgoing.pieces.extend(pieces)
        if last or trailers is not None:
            outgoing.end(trailers)
        self._carrier.outbox.flush(outgoing)

    async def drained(self) -> None:
        """Wait until nothing waits to be sent."""
        outgoing = self._outgoing
        while outgoing.pieces:
            if outgoing.waiter is None:
                outgoing.waiter = asyncio.get_running_loop().create_future()
            await outgoing.waiter

    def consumed(self, num_bytes: int) -> None:
        if not self.dropped:
            self._carrier.consumed(self, num_bytes)

    def reset(self, code: ErrorCode) -> None:
        """End it; its owner hears no more of it."""
        if not self.dropped:
            self._carrier.reset(self, code)
