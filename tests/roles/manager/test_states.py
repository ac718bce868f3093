"""The six states, and every pair of them."""

from __future__ import annotations

import itertools

import pytest

from phalanx.roles.contracts import ReplicaLaunch
from phalanx.roles.replica import Replica
from phalanx.roles.states import EDGES, IllegalTransitionError, check_transition
from phalanx.routing.roles.snapshot import ReplicaState
from phalanx.testing.role_fakes import FakeRoleWorld
from phalanx.testing.virtual_time import run_virtual
from tests.roles.manager.case import model

RFC = {
    ("starting", "ready"),
    ("ready", "draining"),
    ("draining", "sleeping"),
    ("sleeping", "onloading"),
    ("onloading", "ready"),
    ("starting", "dead"),
    ("ready", "dead"),
    ("draining", "dead"),
    ("sleeping", "dead"),
}
D7 = {("onloading", "sleeping"), ("onloading", "dead")}
PAIRS = list(itertools.product(ReplicaState, ReplicaState))


def replica_in(state: ReplicaState) -> Replica:
    spec = model()
    launch = ReplicaLaunch("r", "m/0", 1, spec, spec.engine_groups[0], 0, 0)
    engine = FakeRoleWorld()._start(launch)
    replica = Replica(launch, engine, engine, lambda kind, detail: None)
    replica.state = state
    return replica


def test_i76_there_are_six_states():
    assert [state.value for state in ReplicaState] == [
        "starting",
        "ready",
        "draining",
        "sleeping",
        "onloading",
        "dead",
    ]


def test_i77_the_edges_are_those_of_the_diagram_and_of_d7():
    assert {(before.value, after.value) for before, after in EDGES} == RFC | D7
    assert len(PAIRS) - len(EDGES) == 25


@pytest.mark.parametrize("before, after", PAIRS)
def test_i78_every_other_pair_raises_and_changes_nothing(before, after):
    async def scenario():
        replica = replica_in(before)
        if (before.value, after.value) in RFC | D7:
            replica.move(after, "why")
            assert (replica.state, replica.detail) == (after, "why")
            return
        with pytest.raises(IllegalTransitionError, match=f"from {before.value} to {after.value}"):
            replica.move(after, "why")
        assert (replica.state, replica.detail) == (before, "")

    run_virtual(scenario())


def test_i79_nothing_leads_out_of_dead():
    for after in ReplicaState:
        with pytest.raises(IllegalTransitionError, match="no other state"):
            check_transition(ReplicaState.DEAD, after)


def test_d7_a_wake_that_failed_has_two_ways_out():
    check_transition(ReplicaState.ONLOADING, ReplicaState.SLEEPING)
    check_transition(ReplicaState.ONLOADING, ReplicaState.DEAD)
