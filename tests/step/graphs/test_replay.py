"""Captured steps: lease, padding, slots in turn, and what makes a step eager after all."""

from __future__ import annotations

import pytest
import torch

from phalanx.device.cpu import CpuBackend
from phalanx.errors import CaptureMismatchError, ConfigurationError
from phalanx.step.batch import ExecutingBatch
from phalanx.step.engine import StepEngine
from phalanx.step.graphs.capture_config import CaptureConfig
from phalanx.step.graphs.shapes import Shapes
from phalanx.step.outcomes import AdmitOutcome, AllocationFailed
from phalanx.testing.probe_resource import ProbeSpec
from tests.step.graphs.nodes import NODE, WALK, Bench, Doubler, LoggedBackend, Number

ROWS = CaptureConfig(WALK, Shapes(rows=(1, 2, 4)), aliases=("again",))
GUIDED = CaptureConfig(WALK, Shapes(rows=(4,)), key="guided")


def probed(*configs: CaptureConfig, backend: LoggedBackend | None = None, **probe) -> Bench:
    spec = ProbeSpec("probe", frozenset({NODE}), **probe)
    return Bench(Doubler(*configs, probe=True), spec, backend=backend)


@pytest.fixture
def bench():
    made = probed(ROWS, GUIDED)
    made.open(a=1.0, b=2.0, c=3.0)
    yield made
    made.close()


def slots_of(bench: Bench, *batches: tuple[str, ...], walk: str = WALK) -> list[int]:
    return [bench.step(*rids, walk=walk).lease.slot for rids in batches]


def test_item_8_5_1_a_captured_step_calls_no_forward_and_takes_slots_in_turn(bench):
    first, second = slots_of(bench, ("a",), ("b", "a"))
    assert first != second
    assert slots_of(bench, ("a", "b", "c"), ("c",), ("c", "a")) == [first, second, first]
    assert bench.node.eager == []
    assert bench.seen() == {"a": [2.0] * 4, "b": [4.0] * 2, "c": [6.0] * 3}


def test_defect_8_6_12_shapes_and_walks_of_a_node_share_one_count_of_slots(bench):
    bench.numbers["c"].key = "guided"
    batches = [(("a",), WALK), (("c",), WALK), (("a", "b"), "again"), (("c", "a"), "again")]
    leases = [bench.step(*rids, walk=walk).lease for rids, walk in batches[:3]]
    assert [lease.bucket.key for lease in leases] == [None, "guided", None]
    assert len({leases[0].slot, leases[1].slot}) == 2
    assert leases[2].slot == leases[0].slot


def test_nodes_have_slots_of_their_own():
    engine = StepEngine(CpuBackend(capture="tape"))
    nodes = {"x": Doubler(ROWS, probe=True), "y": Doubler(ROWS, probe=True)}
    engine.load_model(nodes, [ProbeSpec("probe", frozenset(nodes))])
    engine.warm_up()
    engine.add_request("a", Number(1.0), {})
    slots = []
    for node in ("x", "y", "x", "y"):
        batch = ExecutingBatch(node, WALK, [engine.row("a", 1)])
        engine.prepare_inputs(batch)
        engine.exec(batch)
        slots.append(batch.lease.slot)
    assert len(set(slots)) == 4


def test_rule_2_17_7_padding_is_never_in_outputs_and_never_published(bench):
    batch = bench.step("a", "b", "c")
    assert batch.lease.bucket.rows == 4
    (outputs,) = batch.outputs
    assert outputs.columns["y"].request_ids == ("a", "b", "c")
    assert outputs.columns["y"].values.tolist() == [2.0, 4.0, 6.0]
    assert [row.info.published for row in batch.rows] == [
        {"probe": f"probe of {rid}"} for rid in "abc"
    ]


def test_outputs_are_owned_and_outlive_the_next_replays(bench):
    before = [bench.step("a"), bench.step("b")]
    for _ in range(3):
        bench.step("c")
    assert [batch.outputs[0].columns["y"].values.item() for batch in before] == [2.0, 4.0]


def test_padding_holds_what_the_static_inputs_gave_it(bench):
    seen = []
    bench.node.compute = lambda x: x * 2
    bench.step("c", "b", "a")
    graphs = bench.engine._nodes[NODE].graphs._graphs
    for captured in graphs.captures._made.values():
        for one in captured.values():
            seen.append(one.inputs["x"])
    bench.step("b")
    widest = max(seen, key=len)
    assert widest.tolist()[:1] == [2.0]
    bench.step("a", "b", "c")
    assert widest.tolist() == [1.0, 2.0, 3.0, -1.0]


def test_a_batch_larger_than_any_shape_runs_eagerly():
    bench = probed(CaptureConfig(WALK, Shapes(rows=(1, 2))))
    bench.open(a=1.0, b=2.0, c=3.0)
    batch = bench.step("a", "b", "c")
    assert (batch.lease, batch.failed_requests) == (None, {})
    assert bench.node.eager == [("a", "b", "c")]
    assert bench.seen() == {"a": [2.0], "b": [4.0], "c": [6.0]}
    bench.close()


def test_a_key_that_no_capture_has_runs_eagerly(bench):
    bench.numbers["b"].key = "unheard of"
    batch = bench.step("a", "b")
    assert (batch.lease, batch.failed_requests) == (None, {})
    assert bench.node.eager == [("a", "b")]


def test_rows_of_other_lengths_run_eagerly(bench):
    assert bench.step("a", "b", span=2).lease is None
    assert bench.seen()["a"] == [2.0]


def test_an_alias_replays_the_captured_walk(bench):
    lease = bench.step("a", walk="again").lease
    assert lease.bucket.walk == WALK
    assert bench.node.eager == []


def test_a_step_that_declares_another_key_is_refused_and_nothing_stays_in_flight(bench):
    bench.node.declared_key = lambda key: "wrong"
    batch = bench.step("a", "b")
    assert set(batch.failed_requests) == {"a", "b"}
    for error in batch.failed_requests.values():
        assert isinstance(error, CaptureMismatchError)
        for part in (NODE, "rows=2", "'wrong'", "None", "capture_key"):
            assert part in str(error)
    assert batch.outputs == []
    assert bench.node.eager == []
    assert not bench.engine.resource("probe").in_flight
    bench.node.declared_key = lambda key: key
    bench.step("a", "b")
    assert bench.seen()["a"] == [2.0]


def test_defect_8_6_8_rows_dropped_after_the_lease_get_another_one(bench):
    """Dropping the only guided request changes what the rest declares."""
    bench.numbers["c"].key = "guided"
    batch = bench.batch("a", "b", "c")
    leased = bench.engine.reserve_slot(batch)
    assert leased.bucket.key == "guided"
    assert bench.engine.reserve_slot(batch) is leased
    bench.node.skip = {"c"}
    bench.run(batch)
    assert batch.failed_requests == {}
    assert (batch.lease.bucket.key, batch.lease.bucket.rows) == (None, 2)
    assert batch.lease.slot == leased.slot
    assert bench.seen() == {"a": [2.0], "b": [4.0], "c": []}


def test_a_leased_step_that_all_rows_leave_computes_nothing(bench):
    batch = bench.batch("a")
    assert bench.engine.reserve_slot(batch) is not None
    bench.node.skip = {"a"}
    bench.run(batch)
    assert batch.outputs == []
    assert batch.outputs_ready.is_set()
    assert bench.seen()["a"] == []


def test_a_node_that_cannot_say_its_key_runs_eagerly(bench):
    class Odd(Doubler):
        def capture_key(self, walk, rows):
            raise KeyError("no key")

        def declare_step(self, walk, rows, inputs):
            return None

    odd = Bench(Odd(ROWS))
    odd.open(a=1.0)
    assert odd.step("a").failed_requests == {}
    assert odd.node.eager == [("a",)]


def test_a_packed_shape_is_leased_once_inputs_are_prepared():
    node = Doubler(CaptureConfig(WALK, Shapes(rows=(2,), token_buckets=(4,))))
    node.input_size = lambda rows, tokens: tokens
    node.compute = lambda x: x[::2] * 2
    bench = Bench(node)
    bench.open(a=1.0, b=5.0)
    batch = bench.batch("a", "b", span=2)
    assert bench.engine.reserve_slot(batch) is None
    bench.run(batch)
    assert batch.lease.bucket.tokens == 4
    assert bench.seen() == {"a": [2.0], "b": [10.0]}


def test_only_receivers_get_a_column(bench):
    bench.node.receivers = lambda rids: {"y": tuple(rid for rid in rids if rid != "b")}
    (outputs,) = bench.step("a", "b", "c").outputs
    assert outputs.columns["y"].request_ids == ("a", "c")
    assert outputs.columns["y"].values.tolist() == [2.0, 6.0]


def test_inputs_that_do_not_fit_are_refused_and_the_rows_run_alone(bench):
    class Odd(Doubler):
        def preprocess(self, engine, inputs):
            made = super().preprocess(engine, inputs)
            return {"z": made["x"]} if engine.lease is not None else made

    odd = Bench(Odd(ROWS))
    odd.open(a=1.0, b=2.0)
    batch = odd.step("a", "b")
    assert batch.failed_requests == {}
    assert odd.node.eager == [("a",), ("b",)]
    assert odd.step("a").failed_requests["a"].args[0].startswith("node 'doubler' as BucketKey")


def test_a_refused_captured_step_reserves_nothing():
    full = AdmitOutcome(ok=False, reason=AllocationFailed("full", 1, "a"))
    refusing = []
    bench = probed(ROWS, react=lambda verb, rids: full if verb == "admit" and refusing else None)
    bench.open(a=1.0)
    refusing.append(None)
    batch = bench.step("a")
    assert batch.admit_error == full.reason
    assert batch.launch_started.is_set() and batch.commit_done.is_set()
    refusing.clear()
    bench.step("a")
    assert bench.seen() == {"a": [2.0]}
    bench.close()


def test_rule_2_17_5_the_launch_is_announced_after_staging_and_before_the_replay():
    backend = LoggedBackend()
    bench = probed(ROWS, backend=backend)
    bench.open(a=7.0)
    batch = bench.batch("a")
    bench.engine.prepare_inputs(batch)
    graphs = bench.engine._nodes[NODE].graphs._graphs
    staged = []

    class Watched:
        def set(self) -> None:
            lease = batch.lease
            staged.extend(graphs.captures._made[lease.bucket][lease.slot].inputs["x"].tolist())
            backend.log.append("launch started")

        def is_set(self) -> bool:
            return bool(staged)

    batch.launch_started = Watched()
    backend.log.clear()
    bench.engine.exec(batch)
    assert staged[:1] == [7.0]
    assert backend.log.index("launch started") < backend.log.index("replay")


def test_rule_2_17_4_a_replay_waits_for_the_plans_that_were_made_ahead():
    backend = LoggedBackend()
    bench = probed(ROWS, backend=backend)
    bench.open(a=1.0)
    batch = bench.batch("a")
    bench.engine.prepare_inputs(batch)
    backend.log.clear()
    assert bench.engine.pre_plan(batch)
    assert backend.log == ["record"], "an event behind the plans"
    bench.engine.exec(batch)
    assert backend.log[1:3] == ["wait", "replay"]
    assert bench.node.eager == []
    bench.close()


def test_a_slot_is_planned_into_only_behind_its_last_replay():
    backend = LoggedBackend()
    bench = probed(ROWS, backend=backend)
    bench.open(a=1.0)
    for _ in range(2):
        bench.step("a")
    backend.log.clear()
    batch = bench.batch("a")
    bench.engine.prepare_inputs(batch)
    bench.engine.pre_plan(batch)
    assert backend.log == ["wait", "record"]
    bench.engine.reset_pre_plan(batch)
    assert backend.log == ["wait", "record", "wait"], "nor before plans that were given up"
    bench.close()


def test_item_8_5_2_a_stale_plan_in_a_slot_is_overwritten_by_the_rows_that_are_left():
    bench = probed(ROWS)
    bench.open(a=1.0, b=2.0, c=3.0)
    batch = bench.batch("a", "b", "c")
    bench.engine.prepare_inputs(batch)
    assert bench.engine.pre_plan(batch)
    leased = batch.lease
    batch.drop_rows({"b"})
    assert bench.engine.preplan_is_stale(batch)
    bench.engine.exec(batch)
    assert (batch.lease.bucket.rows, batch.lease.slot) == (2, leased.slot)
    assert batch.outputs[0].columns["y"].values.tolist() == [2.0, 6.0]
    bench.close()


def test_a_row_whose_inputs_cannot_be_collated_fails_alone_and_its_neighbours_finish():
    class Picky(Doubler):
        def preprocess(self, engine, inputs):
            if 13.0 in inputs:
                raise ValueError("thirteen")
            return super().preprocess(engine, inputs)

    bench = Bench(Picky(ROWS))
    bench.open(a=1.0, b=13.0, c=3.0)
    batch = bench.step("a", "b", "c")
    assert {rid: str(error) for rid, error in batch.failed_requests.items()} == {"b": "thirteen"}
    assert bench.seen() == {"a": [2.0], "b": [], "c": [6.0]}
    bench.step("a", "c")
    assert bench.node.eager == [("a",), ("c",)], "alone eagerly, and together captured again"


def test_the_rerun_gives_what_the_tape_gives():
    node = Doubler(ROWS)
    bench = Bench(node, backend=LoggedBackend(capture="rerun"))
    bench.open(a=1.5, b=2.5)
    bench.step("a", "b")
    assert bench.node.eager == []
    assert bench.seen() == {"a": [3.0], "b": [5.0]}


def test_a_prepared_value_that_is_no_tensors_by_name_is_refused():
    class Odd(Doubler):
        def preprocess(self, engine, inputs):
            return torch.tensor(inputs)

    odd = Bench(Odd(ROWS))
    odd.open(a=1.0)
    error = odd.step("a").failed_requests["a"]
    assert isinstance(error, ConfigurationError)
    assert "needs tensors by name" in str(error)
