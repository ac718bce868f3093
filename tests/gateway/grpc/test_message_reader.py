"""Messages out of pieces: whole ones, in order, in no more memory than they need."""

from __future__ import annotations

import random

import pytest

from phalanx.errors import BodyTooLargeError, MalformedRequestError
from phalanx.gateway.grpc.message_reader import MessageReader, prefixed
from phalanx.gateway.http2.read_buffer import READ_BYTES
from tests.wire.fuzzing import taking_at_most

MIB = 1 << 20


@pytest.mark.parametrize("seed", range(5))
def test_messages_are_the_same_however_they_are_cut(seed):
    source = random.Random(seed)
    sent = [source.randbytes(source.choice((0, 1, 5, 300, 70_000))) for _ in range(12)]
    data = memoryview(b"".join(prefixed(each) + each for each in sent))
    reader, position = MessageReader(MIB), 0
    while position < len(data):
        size = source.choice((1, 2, 7, 1000, 100_000))
        reader.feed(data[position : position + size])
        position += size
    assert [each.data for each in reader.whole] == sent
    assert not reader.amid


def test_small_pieces_do_not_keep_what_else_was_read_with_them():
    """Each lies in a read of 64 KiB that is otherwise for others."""
    reader = MessageReader(MIB)
    with taking_at_most(4 * MIB):
        reader.feed(memoryview(b"\0" + MIB.to_bytes(4, "big")))
        for _ in range(1024):
            read = bytes(64 * 1024)
            reader.feed(memoryview(read)[:1024])
        assert len(reader.whole[0].data) == MIB


def test_a_message_of_several_reads_is_not_copied_and_one_of_a_part_of_a_read_is():
    reads = [bytes(READ_BYTES) for _ in range(4)]
    data = [memoryview(reads[0])[-8192:], *map(memoryview, reads[1:3]), memoryview(reads[3])[:8192]]
    reader = MessageReader(4 * MIB)
    reader.feed(memoryview(prefixed(bytes(sum(map(len, data))))))
    for piece in data:
        reader.feed(piece)
    assert [piece.obj for piece in reader.whole.popleft().pieces] == reads
    reader.feed(memoryview(prefixed(bytes(8192))))
    reader.feed(data[0])
    assert [type(piece) for piece in reader.whole.popleft().pieces] == [bytes]


def test_pieces_of_a_byte_cost_little():
    reader, size = MessageReader(MIB), 30_000
    with taking_at_most(2 * MIB):
        reader.feed(memoryview(b"\0" + size.to_bytes(4, "big")))
        for index in range(size):
            reader.feed(memoryview(bytes((index % 256,))))
        assert reader.whole[0].data == bytes(index % 256 for index in range(size))


def test_a_length_that_is_only_said_takes_no_memory():
    reader = MessageReader(100 * MIB)
    with taking_at_most(MIB):
        reader.feed(memoryview(b"\0" + (100 * MIB).to_bytes(4, "big") + b"x"))
    assert reader.amid


def test_what_is_too_large_or_no_message_is_refused_at_its_prefix():
    with pytest.raises(BodyTooLargeError, match="11 bytes; at most 10"):
        MessageReader(10).feed(memoryview(b"\0\0\0\0\x0b"))
    with pytest.raises(MalformedRequestError, match="begins with 9"):
        MessageReader(10).feed(memoryview(b"\x09\0\0\0\x01"))
