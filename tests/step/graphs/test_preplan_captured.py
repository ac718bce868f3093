"""Steps that are planned ahead into the static buffers of a slot, and dropped from or given up."""

from __future__ import annotations

import pytest

from phalanx.step.graphs.capture_config import CaptureConfig
from phalanx.step.graphs.shapes import Shapes
from phalanx.testing.probe_resource import ProbeSpec
from tests.step.graphs.nodes import NODE, WALK, Bench, Doubler, LoggedBackend


@pytest.fixture
def bench():
    configs = [CaptureConfig(WALK, Shapes(rows=(1, 2, 4)), key=key) for key in (None, "guided")]
    node = Doubler(*configs, probe=True)
    made = Bench(node, ProbeSpec("probe", frozenset({NODE})), backend=LoggedBackend())
    made.open(a=1.0, b=2.0, c=3.0)
    made.engine.backend.log.clear()
    yield made
    made.close()


def planned(bench: Bench, *rids: str):
    batch = bench.batch(*rids)
    bench.engine.prepare_inputs(batch)
    assert bench.engine.pre_plan(batch)
    return batch


def finish(bench: Bench, batch) -> None:
    bench.engine.exec(batch)
    bench.engine.check_stop(batch)
    bench.engine.finalize(batch)


def test_item_8_5_2_a_plan_made_ahead_is_replayed_on_its_slot(bench):
    batch = planned(bench, "a", "b", "c")
    leased = batch.lease
    assert leased.bucket.rows == 4
    finish(bench, batch)
    assert batch.lease is leased
    assert "replay" in bench.engine.backend.log
    assert bench.seen() == {"a": [2.0], "b": [4.0], "c": [6.0]}


def test_defect_8_6_8_a_row_dropped_after_the_plan_takes_its_key_along(bench):
    """Without the only guided row the others declare another step than the slot was planned for."""
    bench.numbers["c"].key = "guided"
    batch = planned(bench, "a", "b", "c")
    assert batch.lease.bucket.key == "guided"
    batch.drop_rows({"c"})
    finish(bench, batch)
    assert batch.failed_requests == {}
    assert (batch.lease.bucket.key, batch.lease.bucket.rows) == (None, 2)
    assert "replay" in bench.engine.backend.log
    assert bench.seen() == {"a": [2.0], "b": [4.0], "c": []}


def test_item_8_5_2_a_plan_that_is_given_up_leaves_the_slot_to_the_next(bench):
    given_up = planned(bench, "a", "b")
    bench.engine.reset_pre_plan(given_up)
    assert not bench.engine.resource("probe").in_flight
    for _ in range(3):
        finish(bench, planned(bench, "b", "c"))
    assert bench.seen() == {"a": [], "b": [4.0] * 3, "c": [6.0] * 3}
