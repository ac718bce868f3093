"""Packets and the backlog: order, boundaries, descriptors, and never a wait."""

from __future__ import annotations

import os

import pytest

from phalanx.engine.workers.outbox import Outbox
from phalanx.engine.workers.packets import (
    MAX_PACKET_BYTES,
    MemoryFile,
    PacketSocket,
    UndecodablePacketError,
    create_socket_pair,
)
from tests.engine.workers.descriptors import few_descriptors, num_memory_files


@pytest.fixture
def pair():
    ours, theirs = create_socket_pair()
    ours.setblocking(False)
    with ours, theirs:
        yield PacketSocket(ours), PacketSocket(theirs)


def contents(descriptor):
    with open(descriptor, "rb") as file:
        file.seek(0)
        return file.read()


def test_packets_keep_their_boundaries_and_descriptors(pair):
    left, right = pair
    left.send(b"one", [MemoryFile([b"first"]), MemoryFile([memoryview(b"second")])])
    left.send(b"two")
    packet = right.receive()
    assert bytes(packet.body) == b"one"
    assert [contents(each) for each in packet.descriptors] == [b"first", b"second"]
    packet = right.receive()
    assert (bytes(packet.body), packet.descriptors) == (b"two", [])


def test_a_packet_larger_than_the_socket_takes_arrives_whole_with_its_descriptors(pair):
    left, right = pair
    large = os.urandom(3 * MAX_PACKET_BYTES)
    before = num_memory_files()
    left.send(large, [MemoryFile([b"beside"])])
    packet = right.receive()
    assert packet.body == large
    assert [contents(each) for each in packet.descriptors] == [b"beside"]
    assert num_memory_files() == before


def test_received_descriptors_are_not_inherited(pair):
    left, right = pair
    left.send(b"x", [MemoryFile([b""])])
    (descriptor,) = right.receive().descriptors
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


def test_the_end_comes_after_everything_that_was_sent():
    left, right = create_socket_pair()
    with right:
        left.send(b"last words")
        right.send(b"never read")  # makes the kernel report a reset before the words
        left.close()
        end = PacketSocket(right)
        assert bytes(end.receive().body) == b"last words"
        assert end.receive() is None
        assert end.receive() is None
        with pytest.raises(BrokenPipeError):
            end.send(b"too late")


def test_descriptors_that_did_not_arrive_are_named(pair):
    left, right = pair
    left.send(b"x", [MemoryFile([b"a"]), MemoryFile([b"b"])])
    before = num_memory_files()
    with few_descriptors(1), pytest.raises(UndecodablePacketError, match="too many open files"):
        right.receive()
    assert num_memory_files() == before


def test_a_full_socket_never_blocks_and_what_waits_is_sent_in_order(pair):
    left, right = pair
    outbox = Outbox(left)
    before = num_memory_files()
    for number in range(500):
        files = [MemoryFile([str(number).encode()])] if number % 50 == 0 else []
        outbox.put(b"%d" % number * 100, files)
        del files
    assert outbox.wants_write
    for number in range(510):
        if number < 10:  # there is room again, but not for these
            outbox.put(b"%d" % (500 + number) * 100)
        elif number > 20:
            outbox.flush()
        packet = right.receive()
        assert packet.body == b"%d" % number * 100
        assert [contents(each) for each in packet.descriptors] == [
            str(number).encode() for _ in range(number % 50 == 0 and number < 500)
        ]
    assert not outbox.wants_write
    assert num_memory_files() == before


def test_closing_drops_what_waits_and_its_descriptors(pair):
    left, _ = pair
    outbox = Outbox(left)
    while not outbox.wants_write:
        outbox.put(b"x" * 1000)
    before = num_memory_files()
    outbox.put(b"y", [MemoryFile([b""])])
    assert num_memory_files() == before + 1
    outbox.close()
    assert num_memory_files() == before
    outbox.put(b"z")
    assert not outbox.wants_write


def test_packets_for_a_worker_that_is_gone_are_dropped():
    left, right = create_socket_pair()
    with left:
        left.setblocking(False)
        outbox = Outbox(PacketSocket(left))
        while not outbox.wants_write:
            outbox.put(b"x" * 1000)
        right.close()
        outbox.flush()
        assert not outbox.wants_write
        outbox.put(b"y")
        assert not outbox.wants_write


def test_where_descriptors_run_out_the_packet_waits(pair):
    left, right = pair
    outbox = Outbox(left)
    with few_descriptors(0):
        outbox.put(b"x" * (MAX_PACKET_BYTES + 1))
    assert outbox.wants_write
    outbox.flush()
    assert len(right.receive().body) == MAX_PACKET_BYTES + 1


def test_an_error_of_the_socket_itself_is_raised(pair):
    left, _ = pair
    outbox = Outbox(left)
    left.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        outbox.put(b"x")
