"""Images at one position, given positions, counters that move by what a step says, and imports."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.device.cpu import CpuBackend
from phalanx.errors import ConfigurationError
from phalanx.step.declaration import Fork
from phalanx.step.outcomes import AdmitRuntimeError
from phalanx.step.resources.base import BuildInfo
from phalanx.step.resources.positions import PositionScheme, PositionSpec
from tests.step.caches import context
from tests.step.test_positions import run, step_of


def made(**options):
    positions = PositionSpec("positions", frozenset({"node"}), **options).build(
        BuildInfo(CpuBackend())
    )
    for rid in "ab":
        positions.ingest_request(rid, None)
    return positions


def test_a_block_stands_at_one_position():
    positions = made(scheme=PositionScheme.BLOCK)
    assert run(positions, step_of(("a", 3), ("b", 1), ("a", 0))) == [0, 0, 0, 0]
    assert run(positions, step_of(("a", 2), ("b", 2))) == [1, 1, 1, 1]
    assert positions.publish("a") == {"main": 2}


def test_a_block_moves_the_counter_by_its_step():
    positions = made(scheme=PositionScheme.BLOCK, block_step=4)
    assert run(positions, step_of(("a", 2))) == [0, 0]
    assert run(positions, step_of(("a", 0))) == []
    assert run(positions, step_of(("a", 2), commit=False)) == [4, 4]
    assert run(positions, step_of(("a", 1))) == [4]


def test_a_block_step_of_nothing_is_refused():
    with pytest.raises(ConfigurationError, match="block_step=0"):
        made(block_step=0)


def test_given_positions_are_used_and_the_counter_goes_on():
    positions = made()
    assert run(positions, step_of(("a", 3), ids=np.array([7, 7, 9]))) == [7, 7, 9]
    assert run(positions, step_of(("a", 1))) == [3]


def test_given_positions_of_a_label_leave_the_others_to_their_counters():
    positions = made()
    run(positions, step_of(("a", 5), ("a", 2, "image")))
    step = step_of(
        ("a", 1), ("a", 2, "image"), ("b", 1), ("b", 1, "image"), ids={"image": np.array([8, 9, 6])}
    )
    assert run(positions, step) == [5, 8, 9, 0, 6]


def test_a_step_says_how_far_its_counters_move():
    positions = made()
    run(positions, step_of(("a", 4), ("b", 3), advance=(1, 0)))
    assert positions.publish("a") == {"main": 1}
    assert positions.publish("b") == {"main": 0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ids": np.array([1, 2])}, "give ids by label"),
        ({"ids": {"other": np.array([1])}}, "name labels .*'other'"),
        ({"ids": {"image": np.array([1])}}, "have 2 tokens"),
        ({"advance": (1,)}, "1 entries for 2 segments"),
    ],
)
def test_positions_that_do_not_fit_their_segments_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        step_of(("a", 1), ("a", 2, "image"), **options)


def test_an_import_never_moves_a_counter_back():
    positions = made()
    run(positions, step_of(("a", 5)))
    assert positions.admit_retrieve("a", {"main": 3, "image": 2}).ok
    assert positions.publish("a") == {"main": 5, "image": 2}
    assert positions.admit_retrieve("a", {"main": 8}).ready
    assert run(positions, step_of(("a", 1))) == [8]
    assert positions.admit_retrieve("a", None).ok


def test_an_import_for_nobody_leaves_nothing_behind():
    positions = made()
    assert positions.admit_retrieve("gone", {"main": 3}).ok
    assert positions.publish("gone") == {}


def test_what_cannot_be_read_ends_the_request():
    reason = made().admit_retrieve("a", 17).reason
    assert reason == AdmitRuntimeError("positions 'positions' cannot read 'int'", "a")


def test_a_commit_behind_a_removal_brings_nobody_back():
    positions = made()
    step = step_of(("a", 2), ("b", 1), post_forks=(Fork("a", "main", "kept"),))
    positions.plan(step, context())
    positions.remove_request("a")
    positions.commit(step, context())
    assert positions.publish("a") == {}
    assert positions.publish("b") == {"main": 1}
    positions.remove_request("b")
    assert positions.at_rest()


def test_defect_8_6_15_a_second_ingest_does_not_wipe_the_counters():
    positions = made()
    run(positions, step_of(("a", 5), ("a", 2, "image")))
    positions.ingest_request("a", None)
    assert positions.publish("a") == {"main": 5, "image": 2}
