"""One step from a request to a counted replica: least in flight, or by key, for both who choose."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import NoServerError, RoleNotReadyError
from phalanx.routing.roles.affinity import Affinity
from phalanx.routing.roles.balancer import RoleBalancer
from phalanx.routing.roles.resolver import RoleSelector
from phalanx.routing.roles.snapshot import ReplicaState, RoleReplica
from phalanx.schema.roles import RouteMode, RoutingPolicy, RoutingSpec
from phalanx.testing.clock import ManualClock
from tests.routing.roles.snapshots import model, replica, snapshot

KEYS = [f"group-{number}" for number in range(400)]
BY_KEY = RoutingSpec(policy=RoutingPolicy.AFFINITY)


def four() -> tuple[RoleReplica, ...]:
    return tuple(replica(f"math/{number}") for number in range(4))


def balancer() -> RoleBalancer:
    return RoleBalancer(ManualClock())


def test_a_key_belongs_to_one_replica_whoever_asks_and_in_whatever_order():
    first, second = Affinity(), Affinity()
    for key in KEYS[:50]:
        assert first.prefer(key, four()) == second.prefer(key, tuple(reversed(four())))


def test_keys_spread_over_replicas():
    counts = Counter(Affinity().prefer(key, four()).engine_id for key in KEYS)
    assert len(counts) == 4 and min(counts.values()) > len(KEYS) / 8


@given(
    st.sets(st.integers(0, 9), min_size=2).map(sorted),
    st.lists(st.text(max_size=6), min_size=1, max_size=20),
)
@settings(max_examples=40, deadline=None)
def test_only_the_keys_of_a_replica_that_left_move(ordinals, keys):
    affinity = Affinity()
    before = [replica(f"math/{number}") for number in ordinals]
    after = before[1:]
    for key in keys:
        was, now = affinity.prefer(key, before), affinity.prefer(key, after)
        assert now in after and (was is before[0] or now is was)
        assert affinity.prefer(key, before, frozenset({before[0].server_id})) is now


def test_where_all_are_excluded_nobody_is_preferred():
    gone = frozenset(one.server_id for one in four())
    assert Affinity().prefer("k", four(), gone) is None
    with pytest.raises(NoServerError, match="has been tried"):
        balancer().acquire(
            snapshot(model("math", *four()), routing=BY_KEY),
            RoleSelector(),
            direct=True,
            affinity="k",
            exclude=gone,
        )


def test_by_policy_affinity_a_key_stays_and_a_restart_does_not_move_it():
    chooser, of = balancer(), snapshot(model("math", *four()), routing=BY_KEY)
    _, ticket = chooser.acquire(of, RoleSelector(), direct=True, affinity="k")
    for _ in range(5):
        _, again = chooser.acquire(of, RoleSelector(), direct=False, affinity="k")
        assert again.server is ticket.server
    restarted = tuple(replica(one.engine_id, generation=1) for one in four())
    of = snapshot(model("math", *restarted), routing=BY_KEY)
    _, after = chooser.acquire(of, RoleSelector(), direct=True, affinity="k")
    assert after.server.engine_id == ticket.server.engine_id


@pytest.mark.parametrize(
    ("routing", "key"), [(RoutingSpec(), "k"), (RoutingSpec(), None), (BY_KEY, None)]
)
def test_without_policy_or_key_the_least_busy_is_chosen(routing, key):
    chooser, of = balancer(), snapshot(model("math", *four()), routing=routing)
    tickets = [chooser.acquire(of, RoleSelector(), direct=True, affinity=key)[1] for _ in range(8)]
    assert Counter(one.server.engine_id for one in tickets) == {
        f"math/{number}": 2 for number in range(4)
    }


def test_a_router_is_counted_as_one_server():
    router = model("math", route_mode=RouteMode.SGLANG_ROUTER, router_url="http://r:1")
    chooser = balancer()
    chosen, ticket = chooser.acquire(snapshot(router), RoleSelector(), direct=False)
    assert (chosen, ticket.server.base_url) == (router, "http://r:1")
    assert chooser.load.count(ticket.server.server_id) == 1
    with pytest.raises(NoServerError):
        chooser.acquire(
            snapshot(router),
            RoleSelector(),
            direct=False,
            exclude=frozenset({ticket.server.server_id}),
        )
    ticket.release()
    assert chooser.load.total == 0


def test_a_new_process_of_an_engine_begins_with_nothing_in_flight():
    chooser = balancer()
    old, new = replica("math/0"), replica("math/0", generation=1)
    _, ticket = chooser.acquire(snapshot(model("math", old)), RoleSelector(), direct=False)
    chooser.keep(snapshot(model("math", new)))
    assert (chooser.load.count(old.server_id), chooser.load.count(new.server_id)) == (1, 0)
    ticket.release()
    assert chooser.load.count(old.server_id) == 0


def test_counts_of_replicas_that_left_are_dropped_and_those_still_busy_later():
    chooser = balancer()
    of = snapshot(model("math", *four()))
    chooser.keep(of)
    tickets = [chooser.acquire(of, RoleSelector(), direct=False)[1] for _ in range(4)]
    for ticket in tickets[1:]:
        ticket.release()
    assert chooser.load.num_accounts == 4
    chooser.keep(snapshot(model("math")))
    assert chooser.load.num_accounts == 1
    tickets[0].release()
    assert chooser.load.num_accounts == 0


def test_many_choosers_do_not_all_begin_with_the_first_replica():
    of = snapshot(model("math", *four()))
    counts = Counter()
    for number in range(40):
        turns = iter([(number * 7 + place * 13) % 4 for place in range(4)])
        chooser = RoleBalancer(ManualClock(), first_turn=lambda turns=turns: next(turns))
        counts[chooser.acquire(of, RoleSelector(), direct=True)[1].server.engine_id] += 1
    assert len(counts) == 4


def test_what_cannot_be_resolved_counts_nothing():
    chooser = balancer()
    asleep = model("math", replica("math/0", ReplicaState.SLEEPING), state=ReplicaState.SLEEPING)
    with pytest.raises(RoleNotReadyError):
        chooser.acquire(snapshot(asleep), RoleSelector(), direct=False)
    assert chooser.load.total == 0
