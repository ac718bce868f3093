"""What is written when, by a transport that is full at times."""

from __future__ import annotations

import asyncio

from phalanx.gateway.http2 import frames
from phalanx.gateway.http2.frames import DATA, END_STREAM, FIRST_WINDOW, HEADERS
from phalanx.gateway.http2.limits import Http2Limits
from phalanx.gateway.http2.outbox import Outbox
from tests.gateway.policy_servers import run


class Full(asyncio.Transport):
    """Has room for `room` bytes, and pauses whoever writes more."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.written = bytearray()
        self.ended: list[int] = []
        self.outbox = Outbox(self, Http2Limits(), self)

    def writelines(self, parts):
        self.written += b"".join(parts)
        if len(self.written) >= self.room:
            self.outbox.pause()

    def is_closing(self):
        return False

    def get_write_buffer_size(self):
        return len(self.written)

    def sent(self, stream_id):
        self.ended.append(stream_id)

    def stalled(self, stream_id): ...

    def empty(self) -> list[tuple[int, int, int]]:
        """Take what was written: the kinds, flags and lengths of the frames."""
        found, at = [], 0
        while at < len(self.written):
            num_bytes, kind, flags, _ = frames.head_fields(self.written, at)
            found.append((kind, flags, num_bytes))
            at += frames.HEAD_BYTES + num_bytes
        self.written.clear()
        self.outbox.resume()
        return found


def test_no_more_is_written_than_the_transport_has_room_for():
    """However much the peer would take: what waits for it here is bounded."""

    async def scenario():
        transport = Full(400_000)
        outbox = transport.outbox
        outbox.peer_settings(1 << 30, 1 << 20)
        outbox.credit(0, 1 << 30)
        streams = [outbox.open(stream_id) for stream_id in (1, 3)]
        for outgoing in streams:
            outgoing.pieces.append(bytes(6_000_000))
            outgoing.end()
            outbox.flush(outgoing)
        sizes = []
        while not all(outgoing.closed for outgoing in streams):
            sizes.append(len(transport.written))
            transport.empty()
        assert max(sizes) < 2_000_000
        assert sorted(transport.ended) == [1, 3]

    run(scenario())


def test_an_end_waits_for_the_transport_and_not_for_a_window():
    async def scenario():
        transport = Full(60_000)
        outbox = transport.outbox
        outgoing = outbox.open(1)
        outgoing.pieces.append(bytes(FIRST_WINDOW))
        outbox.flush(outgoing)
        outbox.write_out()
        outgoing.end(b"trailers")
        outbox.flush(outgoing)
        assert [kind for kind, *_ in transport.empty()] == [DATA] * 4
        outbox.write_out()
        assert transport.empty() == [(HEADERS, END_STREAM | frames.END_HEADERS, 8)]

    run(scenario())
