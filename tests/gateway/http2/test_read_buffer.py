"""What was read stays as it is for as long as anybody has a part of it."""

from __future__ import annotations

import random
import weakref

from phalanx.gateway.http2.read_buffer import READ_BYTES, ReadBuffer


def read(buffer: ReadBuffer, data: bytes) -> memoryview:
    """As an event loop does it."""
    room = buffer.room()
    num_bytes = min(len(room), len(data))
    room[:num_bytes] = data[:num_bytes]
    return buffer.taken(num_bytes)


def test_nothing_is_written_over_while_others_are_read():
    source, buffer = random.Random(1), ReadBuffer()
    kept = []
    for _ in range(200):
        data = source.randbytes(source.choice((1, 9, 1000, 70_000, READ_BYTES)))
        part = read(buffer, data)
        kept.append((part, data[: len(part)]))
    assert all(part == data for part, data in kept)


def test_there_is_always_room_for_much_and_a_read_of_nothing_takes_none():
    buffer = ReadBuffer()
    for num_bytes in (0, 1, 0, READ_BYTES // 3, READ_BYTES, 0, READ_BYTES - 1, READ_BYTES):
        assert len(buffer.room()) >= READ_BYTES // 2
        before = len(buffer.room())
        taken = len(read(buffer, bytes(num_bytes)))
        assert taken == min(num_bytes, before)
        if not taken:
            assert len(buffer.room()) == before


def test_memory_that_nobody_has_a_part_of_is_let_go():
    buffer = ReadBuffer()
    first = read(buffer, bytes(READ_BYTES))
    gone = weakref.ref(first.obj)
    second = read(buffer, b"x")
    assert second.obj is not first.obj and gone() is not None
    del first
    assert gone() is None
