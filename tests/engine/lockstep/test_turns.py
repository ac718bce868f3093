"""Several loops in one process, joined by real sockets as the ranks of a replica are."""

from __future__ import annotations

import socket
import threading
from collections import deque
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx import DeviceConfig, EngineConfig, EngineUnavailableError, RuntimeConfig
from phalanx.clock import SystemClock
from phalanx.engine.core import EngineCore
from phalanx.engine.executors.loop_thread import LoopThread
from phalanx.engine.lockstep.messages import Cancel, Start
from phalanx.engine.lockstep.rank_links import (
    Address,
    CancelStep,
    FollowerLink,
    LeaderListener,
    StartStep,
)
from phalanx.engine.lockstep.turns import FollowerTurns, LeaderTurns
from phalanx.engine.ranks import Rank, RankPlace
from phalanx.engine.requests import RequestTable
from phalanx.engine.sinks import FutureSink
from phalanx.errors import PhalanxDistError
from phalanx.schema.control import Continue, Pause, PauseMode
from phalanx.schema.events import Delta, Final
from phalanx.testing import Counting, CountingArgs, CountRequest, ManualClock

CONFIG = EngineConfig(DeviceConfig("cpu", "float32"), RuntimeConfig())


class LoggedCounting(Counting):
    """Notes everything that is asked of it, and each batch."""

    def setup(self, args):
        super().setup(args)
        self.log = []

    def start(self, rid, request):
        self.log.append(("start", rid))
        super().start(rid, request)

    def cancel(self, rid):
        self.log.append(("cancel", rid))
        super().cancel(rid)

    def control(self, op):
        self.log.append(("control", op))
        return super().control(op)

    def tick(self):
        events = super().tick()
        self.log.append(("tick", tuple(event.rid for event in events)))
        return events


class OneRank:
    """A loop with its own table, as one process of a replica has them."""

    def __init__(self, make_turns):
        clock = ManualClock()
        self.requests = RequestTable(clock, CONFIG.runtime)
        load = partial(EngineCore, LoggedCounting, CountingArgs(max_batch_size=2), CONFIG, clock)
        self.failures = []
        self.loop = LoopThread(
            load,
            Rank(CONFIG, RankPlace()),
            make_turns(self.requests),
            self.requests,
            self.failures.append,
        )

    @property
    def log(self):
        return self.loop.core.entry.log

    def start(self, rid, count):
        sink = FutureSink()
        live = self.requests.accept(rid, sink)
        self.loop.post(Start(live, CountRequest(count=count)))
        return live, sink.future


def linked(num_followers):
    """A leader's links and its followers', over loopback."""
    listener = LeaderListener("127.0.0.1")
    accepted = Future()
    thread = threading.Thread(
        target=lambda: accepted.set_result(
            listener.accept(range(1, num_followers + 1), 10.0, SystemClock())
        )
    )
    thread.start()
    followers = [FollowerLink(listener.address, rank + 1, 10.0) for rank in range(num_followers)]
    leader = accepted.result()
    thread.join()
    return leader, followers


class Replica:
    def __init__(self, num_followers=2):
        leader, followers = linked(num_followers)
        self.leader = OneRank(lambda requests: LeaderTurns(requests, leader))
        self.followers = [
            OneRank(partial(lambda link, requests: FollowerTurns(requests, link), link))
            for link in followers
        ]

    @property
    def ranks(self):
        return [self.leader, *self.followers]

    def close(self):
        for rank in self.ranks:
            rank.loop.close()


@pytest.fixture
def replica():
    replica = Replica()
    yield replica
    replica.close()


def test_s9_a_request_ends_at_the_leader_when_every_rank_has_finished_it(replica):
    started = [rank.start("one", 3) for rank in replica.ranks]
    assert started[0][1].result().numbers == (0, 1, 2)
    # The leader's future is set by its loop, after the others' acknowledgements.
    for rank in replica.followers:
        assert rank.requests.find("one") is None
        assert rank.log == replica.leader.log


def test_followers_wait_for_a_request_that_has_yet_to_reach_them(replica):
    _, future = replica.leader.start("late", 2)
    replica.followers[0].start("late", 2)
    assert not future.done()
    replica.followers[1].start("late", 2)
    assert future.result().numbers == (0, 1)


def test_a_cancel_is_the_leader_s_alone(replica):
    lives = [rank.start("long", 900) for rank in replica.ranks]
    replica.followers[0].loop.post(Cancel(lives[1][0]))
    replica.leader.loop.post(Cancel(lives[0][0]))
    assert len(lives[0][1].result().numbers) < 900
    outputs = [future.result() for _, future in lives]
    assert outputs[0] == outputs[1] == outputs[2]


@settings(max_examples=25, deadline=None)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("start"), st.integers(0, 6)),
            st.tuples(st.just("cancel"), st.integers(0, 5)),
            st.tuples(st.just("control"), st.sampled_from([Pause(PauseMode.IN_PLACE), Continue()])),
        ),
        max_size=14,
    ),
    order=st.permutations([0, 1, 2]),
)
def test_all_ranks_do_the_same_in_the_same_order(steps, order):
    replica = Replica()
    try:
        lives, futures, answers = [], [], []
        for number, (kind, value) in enumerate(steps):
            if kind == "start":
                started = [replica.ranks[rank].start(f"r{number}", value) for rank in order]
                leading = started[order.index(0)]
                lives.append(leading[0])
                futures.append(leading[1])
            elif kind == "cancel" and value < len(lives):
                lives[value].cancelled = True
                replica.leader.loop.post(Cancel(lives[value]))
            elif kind == "control":
                answers += [replica.ranks[rank].loop.control(value) for rank in order]
        answers += [rank.loop.control(Continue()) for rank in replica.ranks]
        for waited in [*answers, *futures]:
            waited.result()
    finally:
        replica.close()
    for rank in replica.followers:
        assert rank.log == replica.leader.log
    assert [rank.failures for rank in replica.ranks] == [[], [], []]


def test_a_lost_follower_fails_the_leader():
    leader, (follower,) = linked(1)
    rank = OneRank(lambda requests: LeaderTurns(requests, leader))
    follower.close()
    _, future = rank.start("one", 3)
    with pytest.raises(EngineUnavailableError):
        future.result()
    assert isinstance(rank.failures[0], PhalanxDistError)
    assert "rank 1 of this replica is gone" in str(rank.failures[0])
    rank.loop.close()


def test_a_lost_leader_fails_its_followers():
    leader, (follower,) = linked(1)
    rank = OneRank(lambda requests: FollowerTurns(requests, follower))
    _, future = rank.start("one", 3)
    leader.close()
    with pytest.raises(EngineUnavailableError):
        future.result()
    assert "the leader of this replica is gone" in str(rank.failures[0])
    rank.loop.close()


def test_a_stranger_without_the_token_is_turned_away():
    listener = LeaderListener("127.0.0.1")
    accepted = Future()
    thread = threading.Thread(
        target=lambda: accepted.set_result(listener.accept([1], 10.0, SystemClock()))
    )
    thread.start()
    address = listener.address
    stranger = FollowerLink(Address(address.host, address.port, b"x" * 16), 1, 10.0)
    with pytest.raises(PhalanxDistError, match="leader of this replica is gone"):
        stranger.next_turn()
    follower = FollowerLink(address, 1, 10.0)
    leader = accepted.result()
    thread.join()
    leader.announce(1, [])
    assert follower.next_turn() == (1, [])
    for link in (stranger, follower, leader):
        link.close()


def test_an_absent_follower_is_named_by_number():
    listener = LeaderListener("127.0.0.1")
    with pytest.raises(PhalanxDistError, match="only 0 of 1 ranks reached the leader"):
        listener.accept([1], 0.01, SystemClock())


class NotedLinks:
    """Stands for the links of a leader and notes what is asked of them."""

    def __init__(self):
        self.calls = []

    def announce(self, index, steps):
        self.calls.append(("announce", index, list(steps)))

    def await_turn(self, index):
        self.calls.append(("await", index))


def test_s9_a_leader_waits_for_a_last_tick_and_announces_one_turn_ahead_at_most():
    requests, links, inbox = (
        RequestTable(ManualClock(), CONFIG.runtime),
        NotedLinks(),
        SimpleQueue(),
    )
    turns = LeaderTurns(requests, links)
    live = requests.accept("one", FutureSink())
    inbox.put(Start(live, CountRequest(count=1)))
    taken = deque()
    turns.take(inbox, taken, wait=True)
    assert list(taken) == [Start(live, CountRequest(count=1))]
    turns.settle([Delta("one", None)])
    turns.take(inbox, taken, wait=False)
    assert len(taken) == 1
    turns.settle([Final("one", None)])
    start = StartStep(live.number)
    assert links.calls == [
        ("await", -1),
        ("announce", 1, [start]),
        ("await", 0),
        ("announce", 2, []),
        ("await", 2),
    ]


def test_a_request_that_was_cancelled_before_it_came_is_started_and_cancelled_everywhere():
    requests, links, inbox = (
        RequestTable(ManualClock(), CONFIG.runtime),
        NotedLinks(),
        SimpleQueue(),
    )
    live = requests.accept("one", FutureSink())
    live.cancelled = True
    inbox.put(Start(live, CountRequest(count=1)))
    LeaderTurns(requests, links).take(inbox, deque(), wait=True)
    assert links.calls[-1][2] == [StartStep(live.number), CancelStep(live.number)]


def test_a_silent_stranger_does_not_keep_a_rank_out():
    listener = LeaderListener("127.0.0.1")
    address = listener.address
    with socket.create_connection((address.host, address.port)):
        accepted = Future()
        thread = threading.Thread(
            target=lambda: accepted.set_result(
                listener.accept([1], 60.0, SystemClock(), greeting_s=0.05)
            )
        )
        thread.start()
        follower = FollowerLink(address, 1, 10.0)
        leader = accepted.result()
        thread.join()
    leader.announce(1, [])
    assert follower.next_turn() == (1, [])
    follower.close()
    leader.close()


@pytest.mark.parametrize("rank", [0, 2, 1])
def test_a_rank_that_is_not_awaited_or_comes_twice_is_turned_away(rank):
    listener = LeaderListener("127.0.0.1")
    accepted = Future()
    thread = threading.Thread(
        target=lambda: accepted.set_result(listener.accept([1, 3], 10.0, SystemClock()))
    )
    thread.start()
    address = listener.address
    first = FollowerLink(address, 1, 10.0)
    wrong = FollowerLink(address, rank, 10.0)
    with pytest.raises(PhalanxDistError, match="is gone"):
        wrong.next_turn()
    third = FollowerLink(address, 3, 10.0)
    leader = accepted.result()
    thread.join()
    for link in (first, wrong, third, leader):
        link.close()


def test_ids_may_come_again_at_once(replica):
    for _ in range(200):
        started = [rank.start("same", 2) for rank in reversed(replica.ranks)]
        assert started[-1][1].result().numbers == (0, 1)


def test_an_operation_that_was_taken_when_a_rank_was_lost_is_answered():
    leader, (follower,) = linked(1)
    rank = OneRank(lambda requests: LeaderTurns(requests, leader))
    follower.close()
    answers = [rank.loop.control(Continue()) for _ in range(3)]
    for answer in answers:  # the first ones may be applied before the loss is noticed
        assert answer.exception() is None or isinstance(answer.exception(), EngineUnavailableError)
    assert isinstance(rank.loop.control(Continue()).exception(), EngineUnavailableError)
    rank.loop.close()


def test_an_operation_that_no_turn_took_is_answered_at_a_follower():
    leader, (follower,) = linked(1)
    rank = OneRank(lambda requests: FollowerTurns(requests, follower))
    answer = rank.loop.control(Continue())
    other, _ = rank.start("one", 3)
    leader.announce(1, [StartStep(other.number)])
    leader.await_turn(1)
    leader.close()
    assert isinstance(answer.exception(), EngineUnavailableError)
    rank.loop.close()


def test_a_leader_gives_up_a_follower_that_does_not_come_along():
    leader, (follower,) = linked(1)
    rank = OneRank(lambda requests: LeaderTurns(requests, leader, patience_s=0.05))
    _, future = rank.start("one", 1)  # its follower never acknowledges a turn
    rank.loop.close()
    assert isinstance(future.exception(), EngineUnavailableError)
    follower.close()
