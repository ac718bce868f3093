"""When memory runs out: who is moved to the host, who is brought back, and that all get on."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import RequestFailedError
from phalanx.loop.eviction import Candidate, LeastRecentlyUsed, Priority
from phalanx.step.outcomes import AdmitOutcome, AllocationFailed
from phalanx.testing.probe_resource import ProbeSpec
from phalanx.testing.token_request import NODE
from tests.loop.ledger import bench_of, expected


def candidate(rid, *, rank=(0, 0), turn=0, in_batch=False, priority=0.0) -> Candidate:
    return Candidate(rid, rank, turn, in_batch, priority)


class Recording(LeastRecentlyUsed):
    """Remembers what it was asked and what it said."""

    def __init__(self) -> None:
        self.orders: list[list[str]] = []

    def order(self, candidates):
        ordered = super().order(candidates)
        self.orders.append([one.rid for one in ordered])
        return ordered


def test_the_one_that_was_computed_longest_ago_goes_first():
    these = [candidate("new", turn=9), candidate("old", turn=2), candidate("mid", turn=5)]
    assert [one.rid for one in LeastRecentlyUsed().order(these)] == ["old", "mid", "new"]


def test_the_one_with_the_highest_offload_priority_goes_first():
    these = [candidate("small", priority=1.0), candidate("big", priority=7.0, turn=9)]
    assert [one.rid for one in Priority().order(these)] == ["big", "small"]
    tied = [candidate("new", turn=9), candidate("old", turn=2)]
    assert [one.rid for one in Priority().order(tied)] == ["old", "new"]


@pytest.mark.parametrize("policy", [LeastRecentlyUsed(), Priority()])
def test_lower_priority_goes_before_and_then_those_outside_the_step(policy):
    these = [
        candidate("in", turn=1, in_batch=True, priority=9.0),
        candidate("out", turn=5),
        candidate("higher", rank=(-1, 3)),
        candidate("lower in", rank=(1, 4), turn=9, in_batch=True),
    ]
    assert [one.rid for one in policy.order(these)] == ["lower in", "out", "in", "higher"]


CANDIDATES = st.builds(
    Candidate,
    st.just(""),
    st.tuples(st.integers(-1, 1), st.integers(0, 99)),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from([0.0, 1.0, 2.0]),
)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.lists(CANDIDATES, max_size=6, unique_by=lambda one: one.rank[1]),
    st.sampled_from([LeastRecentlyUsed(), Priority()]),
    st.randoms(use_true_random=False),
)
def test_defect_8_6_10_the_order_does_not_depend_on_how_candidates_are_listed(these, policy, dice):
    shuffled = list(these)
    dice.shuffle(shuffled)
    assert policy.order(shuffled) == policy.order(these)


def test_item_8_5_5_a_victim_goes_on_where_it_was():
    bench = bench_of(num_pages=4, page_size=2, host_pages=8)
    for rid in ("old", "young"):
        bench.start(rid, 2, 6)
    seen = 0
    while bench.loop.busy:
        bench.tick()
        seen = max(seen, bench.loop.num_offloaded)
    loop = bench.loop
    assert (loop.num_push_backs, seen) == (0, 1)
    assert loop.num_offloads == loop.num_reloads >= 1
    assert bench.ledger.order == ["old", "young"]
    for rid, state in bench.states.items():
        assert bench.output(rid) == expected(bench, rid)
        assert state.num_push_backs == 0
    assert bench.engine.at_rest()


@pytest.mark.parametrize("host_pages", [0, 1, 2, 3])
def test_item_8_5_5_what_does_not_fit_the_host_is_computed_again(host_pages):
    bench = bench_of(num_pages=6, page_size=2, host_pages=host_pages)
    for index in range(4):
        bench.start(f"r{index}", 3, 8)
    bench.finish()
    assert bench.loop.num_push_backs > 0
    assert bench.states["r0"].num_push_backs == 0
    assert (bench.loop.num_offloads > 0) == (host_pages > 1)
    for rid in bench.states:
        assert bench.output(rid) == expected(bench, rid)


def test_the_oldest_running_request_is_never_moved():
    policy = Recording()
    bench = bench_of(num_pages=8, page_size=2, host_pages=20, eviction=policy)
    for index in range(6):
        bench.start(f"r{index}", 4, 8)
    while bench.loop.busy:
        live = [rid for rid in bench.states if rid not in bench.ledger.ended]
        asked = len(policy.orders)
        bench.tick()
        assert all(live[0] not in order for order in policy.orders[asked:])
    assert bench.loop.num_offloads > 3
    assert bench.loop.num_push_backs == 0
    for rid in bench.states:
        assert bench.output(rid) == expected(bench, rid)


class Measuring(Priority):
    """Remembers by what it was to order."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def order(self, candidates):
        self.seen.append({one.rid: one.offload_priority for one in candidates})
        return super().order(candidates)


def test_the_measure_is_that_of_the_resource_that_ran_out():
    """Pages of the cache, of which the longer ones hold more."""
    policy = Measuring()
    bench = bench_of(num_pages=9, page_size=2, host_pages=20, eviction=policy)
    for rid, length in (("oldest", 4), ("long", 8), ("short", 2)):
        bench.start(rid, length, 6)
    bench.finish()
    first = policy.seen[0]
    assert first["long"] > first["short"] > 0.0
    assert "oldest" not in first
    for rid in bench.states:
        assert bench.output(rid) == expected(bench, rid)


def test_a_victim_outside_the_step_is_preferred():
    """Two walks take turns; the one that outgrows the pool moves one of the other."""
    policy = Recording()
    bench = bench_of(num_pages=8, page_size=2, host_pages=20, eviction=policy)
    for index in range(4):
        bench.start(f"r{index}", 2, 6, place=(NODE, "vw"[index % 2]))
    bench.finish()
    first = policy.orders[0]
    assert {first[0], first[1]} < {"r0", "r1", "r2", "r3"}
    walks = [int(rid[1]) % 2 for rid in first]
    assert walks == sorted(walks, reverse=walks[0] == 1), "all of the other walk come first"
    for rid in bench.states:
        assert bench.output(rid) == expected(bench, rid)


def test_an_offloaded_request_comes_back_before_others_of_lower_rank_start():
    bench = bench_of(num_pages=4, page_size=2, host_pages=8)
    for rid in ("old", "young"):
        bench.start(rid, 2, 6)
    while not bench.loop.num_offloaded:
        bench.tick()
    for index in range(3):
        bench.start(f"later {index}", 1, 1)
    bench.start("first of all", 1, 1, priority=1)
    while not any(rid.startswith("later") for rid in bench.ledger.scheduled):
        assert "first of all" in bench.ledger.scheduled or bench.loop.num_reloads == 0
        bench.tick()
    assert (bench.loop.num_reloads, bench.loop.num_offloaded) == (1, 0)
    bench.finish()


def test_a_request_that_was_moved_from_outside_is_brought_back_and_nobody_else_moves():
    bench = bench_of(num_pages=16, page_size=2, host_pages=16)
    for rid in "ab":
        bench.start(rid, 5, 5)
    bench.tick()
    assert bench.engine.residency.offload("a") > 0
    bench.finish()
    assert (bench.loop.num_push_backs, bench.loop.num_offloads) == (0, 0)
    assert bench.loop.num_reloads == 1
    for rid in bench.states:
        assert bench.output(rid) == expected(bench, rid)


def test_defect_8_6_14_a_reload_that_never_fits_ends_and_does_not_wait():
    """Pages that nobody gives back: the request is dropped, tried again and then refused."""
    bench = bench_of(num_pages=8, page_size=2, host_pages=16)
    bench.start("a", 8, 9)
    bench.tick()
    bench.engine.residency.offload("a")
    taken = bench.cache._pool.take(6)
    for _ in range(9):
        bench.tick()
    assert "no room can be made" in str(bench.error("a"))
    assert isinstance(bench.error("a"), RequestFailedError)
    assert bench.loop.idle
    bench.cache._pool.give_back(taken)
    assert bench.engine.at_rest()


def test_defect_8_6_14_a_reload_that_does_not_fit_has_others_give_up_theirs():
    """Both wait with a part of their state on the device, and together they fill it."""
    bench = bench_of(num_pages=8, page_size=2, host_pages=8)
    for rid in "ab":
        bench.start(rid, 6, 4)
    bench.tick()
    for rid in "ab":
        bench.engine.residency.offload(rid)
    # The rest of each one's state, of a kind that the host has no room for.
    for rid in "ab":
        stream = bench.cache._table.streams[rid].setdefault("rest", type(_stream(bench, rid))())
        stream.append(bench.cache._pool.take(3))
        stream.stored_len = 6
    bench.finish()
    assert bench.states["b"].num_push_backs > 0
    assert bench.states["a"].num_push_backs == 0, "the first in rank keeps what it has"
    for rid in "ab":
        assert bench.output(rid) == expected(bench, rid)


def _stream(bench, rid):
    return bench.cache._table.streams[rid]["main"]


def test_who_waits_with_state_that_cannot_be_moved_gives_it_up_before_the_last_one_fails():
    """Two places that no resource can move; both belong to requests that are on the host."""
    places: set[str] = set()

    def react(verb, rids):
        if verb == "remove":
            places.difference_update(rids)
        elif verb == "admit":
            if len(places.union(rids)) > 2:
                reason = AllocationFailed("no place", 1, rids[-1])
                return AdmitOutcome(ok=False, reason=reason)
            places.update(rids)
        return None

    probe = ProbeSpec("probe", frozenset({NODE}), react=react)
    bench = bench_of(num_pages=16, page_size=2, host_pages=16, probe=probe)
    for rid in "ab":
        bench.start(rid, 4, 3)
    bench.tick()
    for rid in "ab":
        bench.engine.residency.offload(rid)
    bench.start("c", 4, 3, priority=1)
    bench.finish()
    assert bench.states["b"].num_push_backs > 0
    assert bench.states["a"].num_push_backs == 0
    for rid in bench.states:
        assert bench.output(rid) == expected(bench, rid)


def test_push_back_all_drops_what_is_on_the_host_too():
    bench = bench_of(num_pages=4, page_size=2, host_pages=8)
    for rid in ("old", "young"):
        bench.start(rid, 2, 6)
    while not bench.loop.num_offloaded:
        bench.tick()
    bench.loop.paused = True
    bench.loop.push_back_all()
    assert (bench.loop.num_offloaded, bench.loop.num_waiting) == (0, 2)
    assert bench.engine.at_rest()
    bench.engine.release(frozenset({"kv_cache"}))
    bench.engine.restore(frozenset({"kv_cache"}))
    bench.loop.paused = False
    bench.finish()
    for rid in bench.states:
        assert bench.output(rid) == expected(bench, rid)


@pytest.mark.parametrize("how", ["cancel", "fail", "drop"])
def test_an_offloaded_request_ends_like_any_other(how):
    bench = bench_of(num_pages=4, page_size=2, host_pages=8)
    for rid in ("old", "young"):
        bench.start(rid, 2, 6)
    while not bench.loop.num_offloaded:
        bench.tick()
    if how == "fail":
        bench.loop.fail("young", ValueError("told so"))
    elif how == "cancel":
        bench.loop.cancel("young")
    else:
        bench.loop.drop("young")
        bench.ledger.live.discard("young")
    assert bench.loop.num_offloaded == 0
    bench.finish()
    assert bench.output("old") == expected(bench, "old")


CALLS = st.one_of(
    st.tuples(st.just("start"), st.integers(1, 9), st.integers(1, 7), st.integers(-1, 1)),
    st.tuples(st.just("tick"), st.integers(1, 5)),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
)


def follow(calls, policy, num_pages, host_pages):
    bench = bench_of(num_pages, 2, host_pages=host_pages, eviction=policy, tokens=8, running=4)
    seen = []
    names = itertools.count()
    for verb, *values in calls:
        if verb == "start":
            length, count, priority = values
            bench.start(f"r{next(names)}", length, count, priority)
        elif verb == "cancel":
            bench.loop.cancel(f"r{values[0]}")
        else:
            for _ in range(values[0]):
                seen.append(bench.tick())
    bench.finish()
    loop = bench.loop
    return policy.orders, seen, bench.ledger.order, (loop.num_offloads, loop.num_push_backs)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(CALLS, max_size=14), st.integers(9, 12), st.integers(0, 9))
def test_defect_8_6_10_loops_that_are_told_the_same_choose_the_same_victims(
    calls, num_pages, host_pages
):
    first, second = (follow(calls, Recording(), num_pages, host_pages) for _ in range(2))
    assert first == second
