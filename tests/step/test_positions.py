from __future__ import annotations

import pytest

from phalanx.device.cpu import CpuBackend
from phalanx.step.declaration import Fork, Segment
from phalanx.step.resources.base import BuildInfo
from phalanx.step.resources.positions import PositionSpec, PositionStep
from tests.step.caches import context


@pytest.fixture
def positions():
    made = PositionSpec("positions", frozenset({"node"})).build(BuildInfo(CpuBackend()))
    for rid in "ab":
        made.ingest_request(rid, None)
    return made


def step_of(*segments, **options) -> PositionStep:
    return PositionStep(tuple(Segment(*segment) for segment in segments), **options)


def run(positions, step) -> list[int]:
    ctx = context()
    assert positions.admit(step, ctx).ok
    planned = positions.plan(step, ctx).tolist()
    positions.commit(step, ctx)
    return planned


def test_each_token_takes_the_next_position_of_its_stream(positions):
    assert run(positions, step_of(("a", 3), ("b", 1))) == [0, 1, 2, 0]
    assert run(positions, step_of(("b", 2), ("a", 1), ("a", 0))) == [1, 2, 3]
    assert positions.publish("a") == {"main": 4}


def test_labels_count_apart(positions):
    assert run(positions, step_of(("a", 3), ("a", 2, "image"))) == [0, 1, 2, 0, 1]
    assert positions.publish("a") == {"main": 3, "image": 2}


def test_a_second_ingest_does_not_rewind(positions):
    run(positions, step_of(("a", 5)))
    positions.ingest_request("a", None)
    assert run(positions, step_of(("a", 1))) == [5]


def test_without_commit_positions_are_seen_and_not_taken(positions):
    run(positions, step_of(("a", 2)))
    for _ in range(2):
        assert run(positions, step_of(("a", 3), commit=False)) == [2, 3, 4]
    assert positions.publish("a") == {"main": 2}


def test_a_plan_alone_moves_nothing(positions):
    step = step_of(("a", 4))
    positions.plan(step, context())
    positions.unadmit(step, context())
    assert positions.publish("a") == {}


def test_a_removed_request_starts_anew(positions):
    run(positions, step_of(("a", 2)))
    positions.remove_request("a")
    positions.remove_request("nobody")
    positions.ingest_request("a", None)
    assert run(positions, step_of(("a", 1))) == [0]
    for rid in "ab":
        assert not positions.at_rest()
        positions.remove_request(rid)
    assert positions.at_rest()
    assert positions.publish("a") == {}


def test_a_fork_goes_on_where_its_source_stands(positions):
    run(positions, step_of(("a", 4)))
    fork = Fork("a", "main", "branch")
    assert run(positions, step_of(("a", 2, "branch"), pre_forks=(fork,))) == [4, 5]
    assert positions.publish("a") == {"main": 4, "branch": 6}
    run(positions, step_of(("a", 1), post_forks=(Fork("a", "main", "kept"),)))
    assert positions.publish("a") == {"main": 5, "branch": 6, "kept": 5}


def test_forks_follow_each_other_in_order(positions):
    run(positions, step_of(("a", 4)))
    forks = (Fork("a", "main", "one"), Fork("a", "one", "two"))
    assert run(positions, step_of(("a", 1, "two"), pre_forks=forks)) == [4]


def test_a_planned_fork_leaves_no_trace_without_a_commit(positions):
    run(positions, step_of(("a", 4)))
    positions.plan(step_of(("a", 1, "branch"), pre_forks=(Fork("a", "main", "branch"),)), context())
    assert positions.publish("a") == {"main": 4}


def test_the_layout_is_the_segments(positions):
    planned = positions.plan(step_of(("b", 2), ("a", 2)), context())
    assert planned.tolist() == [0, 1, 0, 1]
    assert str(planned.dtype) == "torch.int64"
