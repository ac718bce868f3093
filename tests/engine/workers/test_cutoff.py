"""What is executed of that which waits when a replica is closed: the same by every rank."""

from __future__ import annotations

import mmap
import select
import threading
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.engine.workers.arena import (
    CUTOFF_OFFSET,
    MAX_READERS,
    ArenaReader,
    ArenaWriter,
    create_arena,
)
from phalanx.engine.workers.channel import connect, open_replica
from phalanx.engine.workers.cutoff import Cutoff, RankCutoff, map_words
from phalanx.engine.workers.lifecycle import LifecycleState
from phalanx.engine.workers.messages import Shutdown, Start
from phalanx.testing.worker_runtimes import Deed, Misdeed, Phase
from tests.engine.workers.supervised import in_background


def sides(num_ranks):
    with create_arena(1) as file:
        words = map_words(file.fileno(), CUTOFF_OFFSET)
    return Cutoff(words, num_ranks), [RankCutoff(words, rank) for rank in range(num_ranks)]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_every_rank_executes_what_the_furthest_has_taken(num_taken):
    cutoff, ranks = sides(len(num_taken))
    for rank, number in zip(ranks, num_taken, strict=True):
        for _ in range(number):
            rank.reach()
            assert rank.admits()
    cutoff.decide()
    for rank, number in zip(ranks, num_taken, strict=True):
        later = []
        for _ in range(number, 8):
            rank.reach()
            later.append(rank.admits())
        assert later == [n < max(num_taken) for n in range(number, 8)]


def test_a_rank_that_waits_for_a_request_may_execute_it():
    """It may have received it already; one that executes none yet is seen as well."""
    cutoff, (first, second) = sides(2)
    first.reach()
    cutoff.decide()
    assert first.admits()
    second.reach()
    assert second.admits()
    second.reach()
    assert not second.admits()


class Interrupted(list):
    """Words; a rank takes a request just when the parent has looked how far the ranks have come."""

    def __init__(self):
        super().__init__([0] * 3)
        self.looked = threading.Event()
        self.rank = RankCutoff(self, 1)
        self.admitted = None

    def __getitem__(self, key):
        found = super().__getitem__(key)
        if isinstance(key, slice):
            self.rank.reach()
            self.admitted = in_background(self.rank.admits)
            self.looked.wait()
        else:
            self.looked.set()
        return found


def test_what_is_taken_while_the_parent_decides_waits_for_its_word():
    words = Interrupted()
    Cutoff(words, 2).decide()
    assert words.admitted.result() is False


def test_neither_counters_nor_payloads_decide():
    with create_arena(1) as file:
        rank = RankCutoff(map_words(file.fileno(), CUTOFF_OFFSET), 0)
        writer = ArenaWriter(file.fileno(), MAX_READERS)
        assert writer.write([b"\xff" * mmap.PAGESIZE], mmap.PAGESIZE) is not None
        for reader in range(MAX_READERS):
            ArenaReader(file.fileno(), reader).release((1 << 64) - 2)
        rank.reach()
        assert rank.admits()


def flush(channel):
    while channel.wants_write:
        select.select([], [channel], [])
        channel.flush()


def take_all(worker):
    """The numbers of what is received before the shutdown."""
    numbers = []
    while isinstance((command := worker.receive()[0]), Start):
        numbers.append(command.number)
    assert command == Shutdown("enough")
    return numbers


@pytest.mark.parametrize("num_queued", [3, 400])
def test_what_no_rank_has_taken_is_passed_over(num_queued):
    """Also what did not fit into the socket and waits in the parent."""
    link = open_replica(2, 1 << 20)
    workers = [connect(endpoint) for endpoint in link.endpoints]
    for number in range(num_queued):
        link.sender.submit(number, "a", bytes(9_000 if number % 2 else 9))
    assert workers[0].receive()[0].number == 0
    link.sender.shut_down("enough")
    taking = [in_background(partial(take_all, worker)) for worker in workers]
    for channel in link.channels:
        flush(channel)
    assert [each.result() for each in taking] == [[], [0]]
    link.sender.close()
    for end in (*link.channels, *workers):
        end.close()


@pytest.mark.long
def test_a_close_ends_the_request_in_execution_and_begins_no_other(started, pipe, gate):
    executing, told = pipe("executing"), pipe("told")
    supervisor = started(
        Misdeed(Phase.STOPPING, Deed.ANNOUNCE, worker_id=1, announce=told.path),
        shape={"replicas": 2},
    )
    supervisor.submit(
        0, 1, "a", Misdeed(Phase.EXECUTING, Deed.WAIT, announce=executing.path, gate=gate.path)
    )
    executing.pid()
    for number in range(2, 1000):
        supervisor.submit(0, number, "queued", Misdeed(Phase.EXECUTING, Deed.EXIT))
    closing = in_background(supervisor.close)
    told.pid()  # so the first replica was told as well
    gate.open()
    closing.result()
    assert supervisor.state is LifecycleState.STOPPED and supervisor.failure is None
