"""Both ends of a replica's connection in one process: every place, order, refusals, endings."""

from __future__ import annotations

import contextlib
import pickle
import select
import sys
import threading

import numpy as np
import pytest
import torch

from phalanx.engine.workers.channel import UndecodablePacketError, connect, open_replica
from phalanx.engine.workers.messages import (
    Apply,
    Cancel,
    Crashed,
    Events,
    Finished,
    PayloadRef,
    Place,
    Shutdown,
    Start,
    Stopped,
)
from phalanx.engine.workers.packets import create_socket_pair
from phalanx.errors import EngineOverloadedError, EngineUnavailableError, InvalidRequestError
from phalanx.schema.control import Flush
from phalanx.schema.statistics import LoopStatistics
from tests.engine.workers.descriptors import few_descriptors, num_memory_files

ARENA_BYTES = 1 << 20
SIZES = {Place.PACKET: 100, Place.ARENA: 300_000, Place.FILE: 3_000_000}


@contextlib.contextmanager
def connected(num_ranks=1, arena_bytes=ARENA_BYTES):
    link = open_replica(num_ranks, arena_bytes)
    workers = [connect(endpoint) for endpoint in link.endpoints]
    try:
        yield link, workers
    finally:
        link.sender.close()
        for end in (*link.channels, *workers):
            end.close()


@pytest.fixture
def one():
    with connected() as (link, workers):
        yield link.sender, link.channels[0], workers[0]


def next_replies(channel):
    """Wait until something has come, and take all of it."""
    select.select([channel], [], [])
    return list(channel.receive_all())


@pytest.mark.parametrize("place", list(Place))
def test_a_request_and_its_result_travel_in_every_place(one, place):
    sender, channel, worker = one
    array = np.arange(SIZES[place], dtype=np.uint8)
    assert sender.submit(7, "first", {"x": array}) >= array.nbytes
    command, request = worker.receive()
    assert (command.number, command.rid, command.payload.place) == (7, "first", place)
    np.testing.assert_array_equal(request["x"], array)
    request["x"][:] = 3
    worker.send_events([(7, request)], 0.25, LoopStatistics(num_running=2))
    ((reply, events),) = next_replies(channel)
    told = reply.payload.place, reply.execution_s, reply.statistics.num_running
    assert told == (place, 0.25, 2)
    ((number, arrived),) = events
    assert number == 7 and (arrived["x"] == 3).all()
    arrived["x"][:] = 4


@pytest.mark.parametrize("place", list(Place))
def test_r60_what_is_mutated_after_submit_arrives_as_it_was(one, place):
    sender, _, worker = one
    array, tensor = np.full(SIZES[place], 1, np.uint8), torch.full((SIZES[place],), 1.0)
    sender.submit(1, "a", [array, tensor])
    array[:], tensor[:] = 2, 2
    _, (arrived, arrived_tensor) = worker.receive()
    assert (arrived == 1).all() and (arrived_tensor == 1).all()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_r60_a_tensor_in_shared_memory_is_the_same_memory_in_every_rank(num_ranks):
    tensor = torch.zeros(1000).share_memory_()
    with connected(num_ranks) as (link, workers):
        link.sender.submit(1, "a", {"t": tensor, "x": np.zeros(SIZES[Place.FILE], np.uint8)})
        tensor[1] = 5
        for worker in workers:
            arrived = worker.receive()[1]["t"]
            assert arrived[1] == 5
            arrived[2] += 1
        assert tensor[2] == num_ranks
        workers[0].send_events([(1, arrived)], None, None)
        ((_, ((_, returned),)),) = next_replies(link.channels[0])
        returned[3] = 9
        assert tensor[3] == 9


def test_messages_without_payload_arrive_in_order(one):
    sender, channel, worker = one
    commands = [Cancel(3), Apply(4, Flush()), Shutdown("enough")]
    for command in commands:
        sender.send(command, 0)
    assert [worker.receive() for _ in commands] == [(command, None) for command in commands]
    replies = [Finished(3), Crashed("serving", "x", "line\n" * 50_000, number=3), Stopped()]
    for reply in replies:
        worker.send(reply)
    assert next_replies(channel) == [(reply, []) for reply in replies]
    assert list(channel.receive_all()) == []


def test_every_rank_gets_the_one_payload_and_none_is_overwritten_before_the_last_has_it():
    with connected(3, arena_bytes=200_000) as (link, workers):
        places = [[], [], []]
        for number in range(4):
            link.sender.submit(number, "a", np.full(60_000, number, np.uint8))
            if number < 3:
                places[0].append(workers[0].receive()[0].payload)
        for rank in (0, 1, 2):
            for number in range(len(places[rank]), 4):
                command, request = workers[rank].receive()
                assert command.number == number and (request == number).all()
                places[rank].append(command.payload)
        assert places[0] == places[1] == places[2]
        # The slowest rank had taken nothing, so that the fourth found no room.
        assert [ref.place for ref in places[0]] == [Place.ARENA] * 3 + [Place.FILE]
        link.sender.submit(9, "b", np.zeros(60_000, np.uint8))
        assert workers[2].receive()[0].payload.position == 0


def test_what_an_only_worker_keeps_is_its_own_until_the_last_array_over_it_is_gone(one):
    sender, _, worker = one
    kept = []
    for number in range(12):  # more than half of the arena, so that some are copies
        sender.submit(number, "a", {"x": np.full(50_000, number, np.float32)})
        _, request = worker.receive()
        kept.append(request["x"].reshape(100, 500)[50:])
        kept[-1] += 0.5
    assert all((array == number + 0.5).all() for number, array in enumerate(kept))
    del kept, request
    sender.submit(90, "b", np.zeros(50_000, np.float32))
    assert worker.receive()[0].payload.position == 0


def test_ranks_do_not_see_what_others_make_of_their_arrays():
    with connected(2) as (link, workers):
        link.sender.submit(1, "a", np.zeros(100_000, np.uint8))
        for rank, worker in enumerate(workers):
            _, array = worker.receive()
            assert not array.any()
            array += 1 + rank


def take_starts(worker, numbers):
    """Receive until another command comes; each request is an array of its own number."""
    while isinstance((got := worker.receive())[0], Start):
        assert (got[1] == got[0].number % 251).all()
        numbers.append(got[0].number)


@pytest.fixture
def hasty_threads():
    """Let threads interrupt each other as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def flush(channel):
    while channel.wants_write:
        select.select([], [channel], [])
        channel.flush()


def test_all_ranks_see_the_requests_of_many_threads_in_the_same_order(hasty_threads):
    firsts = (0, 100, 200, 300)
    with connected(2) as (link, workers):

        def write(first):
            for number in range(first, first + 50):
                link.sender.submit(number, "a", np.full(9_000 + number, number % 251, np.uint8))

        seen = [[], []]
        readers = [threading.Thread(target=take_starts, args=each) for each in zip(workers, seen)]
        writers = [threading.Thread(target=write, args=(first,)) for first in firsts]
        for thread in (*readers, *writers):
            thread.start()
        for thread in writers:
            thread.join()
        for rank, channel in enumerate(link.channels):
            link.sender.send(Shutdown("end"), rank)
            flush(channel)
        for thread in readers:
            thread.join()
    assert seen[0] == seen[1] and len(seen[0]) == 200
    for first in firsts:
        assert [n for n in seen[0] if first <= n < first + 50] == list(range(first, first + 50))


def test_a_request_that_cannot_be_sent_is_refused_and_nothing_was_sent(one):
    sender, _, worker = one
    with pytest.raises(InvalidRequestError, match="lock") as caught:
        sender.submit(1, "a", {"x": np.zeros(50_000), "lock": threading.Lock()})
    assert caught.value.field == "lock"
    with pytest.raises(InvalidRequestError, match="not valid Unicode") as caught:
        sender.submit(2, "\ud800", np.zeros(50_000))
    assert caught.value.field == "rid"
    with few_descriptors(0), pytest.raises(EngineOverloadedError, match="ulimit -n"):
        sender.submit(3, "c", np.zeros(SIZES[Place.FILE]))
    sender.submit(4, "d", "e")
    command, request = worker.receive()
    assert (command.number, request) == (4, "e")


def test_events_that_cannot_be_pickled_are_raised_and_nothing_was_sent(one):
    _, channel, worker = one
    with pytest.raises(TypeError, match="lock"):
        worker.send_events([(1, threading.Lock())], None, None)
    worker.send(Stopped())
    assert next_replies(channel) == [(Stopped(), [])]


def test_a_rank_that_reads_nothing_delays_neither_the_sender_nor_its_sibling():
    with connected(2) as (link, workers):
        for number in range(400):
            link.sender.submit(number, "a", bytes(1000))
            assert workers[0].receive()[0].number == number
        stalled, reading = link.channels[1], link.channels[0]
        assert link.sender.wants_write and stalled.wants_write and not reading.wants_write
        link.sender.send(Shutdown("end"), 1)
        for number in range(400):
            stalled.flush()
            assert workers[1].receive()[0].number == number
        stalled.flush()
        assert isinstance(workers[1].receive()[0], Shutdown)
        assert not link.sender.wants_write


def test_a_worker_waits_where_its_parent_reads_slowly(one):
    _, channel, worker = one
    array = np.zeros(200_000, np.uint8)

    def reply():
        for number in range(300):
            worker.send_events([(number, array)], None, None)
        worker.send(Stopped())

    thread = threading.Thread(target=reply)
    thread.start()
    numbers = []
    while True:
        replies = next_replies(channel)
        numbers += [number for _, events in replies for number, _ in events]
        if replies[-1][0] == Stopped():
            break
    thread.join()
    assert numbers == list(range(300))


def test_the_events_of_many_threads_are_written_and_announced_in_one_order(one, hasty_threads):
    _, channel, worker = one

    def reply(first):
        for number in range(first, first + 300):
            worker.send_events([(number, np.full(9_000, number % 251, np.uint8))], None, None)

    threads = [threading.Thread(target=reply, args=(first,)) for first in range(0, 2400, 300)]
    for thread in threads:
        thread.start()
    received, sequences = [], []
    while len(received) < 2400:
        for message, events in next_replies(channel):
            received += events
            if message.payload.place == Place.ARENA:
                sequences.append(message.payload.sequence)
    for thread in threads:
        thread.join()
    assert sequences == list(range(len(sequences)))
    assert all((array == number % 251).all() for number, array in received)
    assert sorted(number for number, _ in received) == list(range(2400))


class Explosive:
    """Pickles well; unpickling raises."""

    def __init__(self, data):
        self.data = data

    def __reduce__(self):
        return _explode, (self.data,)


def _explode(data):
    raise LookupError(f"{len(data)} bytes too many")


@pytest.mark.parametrize("place", list(Place))
def test_a_payload_that_cannot_be_decoded_is_named_and_the_next_one_arrives(one, place):
    sender, channel, worker = one
    for _ in range(5):  # none of them keeps its room
        sender.submit(5, "bad", Explosive(np.zeros(SIZES[place], np.uint8)))
        with pytest.raises(UndecodablePacketError, match="LookupError: .* too many") as caught:
            worker.receive()
        assert caught.value.number == 5 and "'bad'" in str(caught.value)
    sender.submit(6, "good", np.zeros(SIZES[place], np.uint8))
    assert worker.receive()[0].payload.place == place
    worker.send_events([(5, Explosive(b"x"))], None, None)
    with pytest.raises(UndecodablePacketError, match="a worker's events"):
        next_replies(channel)


@pytest.mark.parametrize("packet", [b"\xc1", b"{}", b"\x92\x63\x01", pickle.dumps("hello")])
def test_what_is_no_message_is_named(packet):
    link = open_replica(1)
    (channel,), (endpoint,) = link.channels, link.endpoints
    with endpoint:
        endpoint.send(packet)
        with pytest.raises(UndecodablePacketError, match="is not a message"):
            next_replies(channel)
        channel.close()


def test_a_payload_at_an_impossible_place_is_named():
    link = open_replica(1)
    worker = connect(link.endpoints[0])
    worker.send(Events(PayloadRef(Place.ARENA, (100,), position=1 << 40)))
    with pytest.raises(UndecodablePacketError, match="do not lie in an arena"):
        next_replies(link.channels[0])
    link.channels[0].close()
    worker.close()


def test_a_worker_s_end_is_told_after_its_last_words(one):
    sender, channel, worker = one
    sender.submit(1, "a", "never read")
    worker.send_events([(1, "last")], None, None)
    worker.send(Stopped())
    assert not channel.ended
    worker.close()
    ((_, events), (stopped, _)) = next_replies(channel)
    assert events == [(1, "last")] and stopped == Stopped() and channel.ended
    assert list(channel.receive_all()) == []
    sender.submit(2, "b", "dropped")
    sender.send(Cancel(2), 0)
    assert not channel.wants_write


def test_a_parent_s_end_is_told_after_its_last_words(one):
    sender, channel, worker = one
    worker.send(Stopped())
    sender.submit(1, "a", np.zeros(100_000))
    channel.close()
    assert worker.receive()[0].number == 1
    assert worker.receive() is None
    with pytest.raises(BrokenPipeError):
        worker.send(Stopped())


def test_a_worker_that_comes_too_late_is_told_of_the_end():
    ours, theirs = create_socket_pair()
    ours.close()
    with theirs, pytest.raises(EOFError, match="closed the connection"):
        connect(theirs)


def test_closing_is_idempotent_refuses_further_requests_and_leaves_results_valid():
    with connected() as (link, (worker,)):
        worker.send_events([(1, np.full(100_000, 7, np.uint8))], None, None)
        ((_, ((_, result),)),) = next_replies(link.channels[0])
        for _ in range(2):
            link.sender.close()
            link.channels[0].close()
        with pytest.raises(EngineUnavailableError, match="closed"):
            link.sender.submit(2, "b", "c")
        link.sender.send(Cancel(1), 0)
        assert list(link.channels[0].receive_all()) == [] and link.channels[0].ended
        assert (result == 7).all()


def test_nothing_of_a_closed_connection_stays_open():
    before = num_memory_files()
    with connected(2) as (link, workers):
        link.sender.submit(1, "a", np.zeros(SIZES[Place.FILE], np.uint8))
        link.sender.submit(2, "a", np.zeros(SIZES[Place.ARENA], np.uint8))
        assert num_memory_files() > before
        while workers:
            workers[0].receive()
            workers.pop(0).close()
    assert link.sender.wants_write is False
    assert num_memory_files() == before
