"""The moves of a group of workers, and who makes them when several want to."""

from __future__ import annotations

import pytest

from phalanx.engine.workers.lifecycle import TRANSITIONS, Lifecycle, LifecycleState
from phalanx.errors import EngineUnavailableError

CREATED, STARTING, RUNNING, STOPPING, STOPPED, FAILED = LifecycleState
WAY_TO = {
    CREATED: [],
    STARTING: [STARTING],
    RUNNING: [STARTING, RUNNING],
    STOPPING: [STARTING, RUNNING, STOPPING],
    STOPPED: [STARTING, RUNNING, STOPPING, STOPPED],
    FAILED: [STARTING, FAILED],
}


def lifecycle_in(state):
    lifecycle = Lifecycle()
    for step in WAY_TO[state]:
        if step is FAILED:
            lifecycle.fail(EngineUnavailableError("as asked"))
        else:
            assert lifecycle.move(step)
    assert lifecycle.state is state
    return lifecycle


@pytest.mark.parametrize("to", list(LifecycleState))
@pytest.mark.parametrize("before", list(LifecycleState))
def test_only_the_moves_of_the_table_are_made(before, to):
    lifecycle = lifecycle_in(before)
    allowed = to in TRANSITIONS[before]
    if to is FAILED:
        moved = lifecycle.fail(EngineUnavailableError("later"))
        assert moved is (before if allowed else None)
    else:
        assert lifecycle.move(to) is allowed
    assert lifecycle.state is (to if allowed else before)


def test_a_move_from_another_state_than_was_meant_is_not_made():
    lifecycle = lifecycle_in(STOPPING)
    assert not lifecycle.move(STOPPED, since=CREATED)
    assert lifecycle.fail(EngineUnavailableError("late"), since=RUNNING) is None
    assert lifecycle.state is STOPPING and lifecycle.failure is None


def test_s5_created_starting_and_running_may_be_routed_to():
    assert [state for state in LifecycleState if state.healthy] == [CREATED, STARTING, RUNNING]
    assert [state for state in LifecycleState if state.ended] == [STOPPED, FAILED]


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (CREATED, "have not been started"),
        (STARTING, "still starting"),
        (STOPPING, "being closed"),
        (STOPPED, "is closed"),
        (FAILED, "as asked"),
    ],
)
def test_whoever_is_refused_is_told_why(state, reason):
    lifecycle = lifecycle_in(state)
    assert reason in str(lifecycle.unavailable())
    assert lifecycle.unavailable() is not lifecycle.unavailable()


def test_the_reason_of_a_failure_keeps_its_cause():
    lifecycle = lifecycle_in(RUNNING)
    failure = EngineUnavailableError("gone")
    failure.__cause__ = ChildProcessError("killed")
    assert lifecycle.fail(failure) is RUNNING
    assert lifecycle.failure is failure
    assert lifecycle.unavailable().__cause__ is failure.__cause__
