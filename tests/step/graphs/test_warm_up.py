"""Warm-up: static buffers before captures, largest first, every slot and every rank or not at all."""

from __future__ import annotations

import pytest
import torch

from phalanx.device.cpu import CpuBackend
from phalanx.device.operators.base import HeadLayout
from phalanx.device.operators.torch_operators import TorchOperators
from phalanx.errors import ConfigurationError
from phalanx.step.engine import StepEngine
from phalanx.step.graphs.capture_config import CaptureConfig
from phalanx.step.graphs.compiling import compiled
from phalanx.step.graphs.shapes import Shapes
from phalanx.step.lease import BufferClaim
from phalanx.step.outputs import Column, NodeOutputs
from phalanx.step.resources.attention import AttentionSpec
from phalanx.step.resources.base import BuildInfo, Resource, ResourceSpec
from phalanx.step.resources.kv_cache import KVConfig, KVSpec
from phalanx.testing.probe_resource import ProbeResource, ProbeSpec
from tests.step.graphs.nodes import NODE, WALK, Bench, Doubler, LoggedBackend

SMALL = CaptureConfig(WALK, Shapes(rows=(1, 2)))


class ClaimingSpec(ProbeSpec):
    def build(self, info: BuildInfo) -> Resource:
        return ClaimingProbe(self)


class ClaimingProbe(ProbeResource):
    def claim_buffers(self, claim: BufferClaim) -> None:
        self._called(f"claim {claim.num_slots} {claim.max_rows} {claim.max_tokens}", ())


def sizes(report):
    return [(bucket.rows, bucket.tokens) for bucket in report.captured]


def test_all_nodes_claim_before_anything_is_captured():
    log: list = []
    first = Doubler(CaptureConfig(WALK, Shapes(rows=(1, 4))), probe=True)
    second = Doubler(CaptureConfig(WALK, Shapes(rows=(2,), token_buckets=(9,))), probe=True)
    second.input_size = lambda rows, tokens: rows
    engine = StepEngine(CpuBackend(capture="tape"))
    shared = ClaimingSpec("probe", frozenset({"a", "b"}), log)
    engine.load_model({"a": first, "b": second}, [shared])
    reports = engine.warm_up()
    verbs = [call.verb for call in log]
    assert verbs[:2] == ["claim 2 4 4", "claim 2 2 9"]
    assert not any(verb.startswith("claim") for verb in verbs[2:])
    assert {name: sizes(report) for name, report in reports.items()} == {
        "a": [(4, 4), (1, 1)],
        "b": [(2, 9)],
    }
    assert engine.at_rest()


def test_the_largest_shape_is_captured_first_on_each_slot():
    backend = LoggedBackend()
    bench = Bench(Doubler(CaptureConfig(WALK, Shapes(rows=(2, 8, 4)))), backend=backend)
    assert sizes(bench.report) == [(8, 8), (4, 4), (2, 2)]
    assert backend.log == ["capture 8", "capture 4", "capture 2"], "a stateless node has one slot"


def test_a_node_that_plans_ahead_has_two_slots():
    backend = LoggedBackend()
    probe = ProbeSpec("probe", frozenset({NODE}))
    bench = Bench(Doubler(SMALL, probe=True), probe, backend=backend, num_slots=3)
    assert backend.log == ["capture 2"] * 3 + ["capture 1"] * 3
    assert bench.engine.at_rest()
    with pytest.raises(ConfigurationError, match="num_slots=1; give at least 2"):
        StepEngine(CpuBackend(), num_slots=1)


def test_every_run_of_a_capture_is_undone():
    log: list = []
    Bench(Doubler(SMALL, probe=True), ProbeSpec("probe", frozenset({NODE}), log))
    verbs = [call.verb for call in log]
    assert verbs == ["admit", "plan", "begin", "unadmit"] * 12, "2 shapes, 2 slots, 3 runs"


def test_smaller_shapes_read_the_leading_part_of_the_largest_inputs():
    backend = CpuBackend(capture="tape")
    node = Doubler(SMALL)
    addresses: list[int] = []
    node.compute = lambda x: addresses.append(x.data_ptr()) or x * 2
    Bench(node, backend=backend)
    assert len(set(addresses)) == 1


def test_inputs_that_grow_are_refused():
    node = Doubler(SMALL)
    node.input_size = lambda rows, tokens: 3 - rows
    with pytest.raises(ConfigurationError, match=r"static input 'x'.*never grow"):
        Bench(node)


@pytest.mark.parametrize("failing", [0, 1, 2, 3, 4, 5])
def test_a_shape_that_fails_on_one_slot_is_captured_on_none(failing):
    """Each slot runs twice eagerly, then is captured: six computations of the larger shape."""
    node, runs = Doubler(SMALL, probe=True), []

    def compute(x):
        if len(x) == 2:
            runs.append(None)
            if len(runs) == failing + 1:
                raise MemoryError("full")
        return x * 2

    node.compute = compute
    bench = Bench(node, ProbeSpec("probe", frozenset({NODE})))
    assert sizes(bench.report) == [(1, 1)]
    (refused,) = bench.report.refused.items()
    assert (refused[0].rows, refused[1]) == (2, "MemoryError: full")
    bench.open(a=1.0, b=2.0)
    bench.step("a", "b")
    bench.step("a")
    assert node.eager == [("a", "b")]
    assert bench.seen() == {"a": [2.0, 2.0], "b": [4.0]}
    bench.close()


def test_a_shape_that_fails_on_another_rank_is_captured_on_none():
    engine, asked = StepEngine(CpuBackend(capture="tape")), []
    engine.load_model({NODE: Doubler(SMALL)}, [])

    def agree(worked):
        asked.append(list(worked))
        return [len(asked) != 1]

    report = engine.warm_up(agree)[NODE]
    assert asked == [[True], [True]], "every shape is agreed on, in the same order everywhere"
    assert sizes(report) == [(1, 1)]
    assert list(report.refused.values()) == ["another rank could not capture it"]


def test_a_value_read_by_the_host_is_told_and_computed_eagerly(caplog):
    node = Doubler(SMALL)
    node.compute = lambda x: x * float(x.sum()) / float(x.sum()) * 2
    bench = Bench(node)
    assert sizes(bench.report) == []
    assert all("waits for a value" in why for why in bench.report.refused.values())
    assert "is not captured as" in caplog.text
    bench.open(a=4.0)
    bench.step("a")
    assert bench.seen() == {"a": [8.0]}


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (lambda x: NodeOutputs({"y": Column.by_row(x[:1])}), "has 1 rows; its bucket has 2"),
        (lambda x: NodeOutputs(ragged={"a": {"y": x}}), "ragged outputs are not allowed"),
        (lambda x: {"y": x}, "must return NodeOutputs"),
    ],
)
def test_a_captured_forward_gives_one_row_a_row(forward, why):
    class Wrong(Doubler):
        def forward(self, prepared):
            return forward(prepared["x"])

    bench = Bench(Wrong(CaptureConfig(WALK, Shapes(rows=(2,)))))
    assert [why in text for text in bench.report.refused.values()] == [True]


def test_a_step_declared_for_another_key_is_not_captured():
    class Wrong(Doubler):
        def declare_capture(self, walk, key):
            return self._step((), "other")

    bench = Bench(Wrong(CaptureConfig(WALK, Shapes(rows=(1,)), key="mine")))
    (why,) = bench.report.refused.values()
    assert "has key 'mine' and its step 'other'" in why


def test_operators_that_a_tape_cannot_see_are_refused_at_warm_up():
    class Hidden(TorchOperators):
        capturable = False

    nodes = frozenset({NODE})
    specs: list[ResourceSpec] = [
        KVSpec("kv", nodes, KVConfig(1, 1, 2, 4, 4, 16, torch.float32)),
        AttentionSpec("attention", nodes, "kv", Hidden()),
    ]
    with pytest.raises(ConfigurationError, match="native_operators='off', or do not capture"):
        Bench(Doubler(SMALL), *specs)
    assert HeadLayout(1, 1, 2)


def test_a_device_that_does_not_capture_computes_eagerly():
    bench = Bench(Doubler(SMALL), backend=CpuBackend())
    assert bench.report.captured == ()
    bench.open(a=1.0)
    assert bench.engine.reserve_slot(bench.batch("a")) is None
    bench.step("a")
    assert bench.node.eager == [("a",)]


def test_a_cpu_compiles_nothing():
    class Compiled(Doubler):
        compiles = True

    node = Compiled(CaptureConfig(WALK, Shapes(rows=(1,)), compiles=True))
    bench = Bench(node)
    bench.open(a=1.0, b=2.0)
    bench.step("a")
    bench.step("a", "b")
    assert node.eager == [("a", "b")]
    assert compiled(node.forward, bench.engine.backend, captured=True) == node.forward


def test_eager_forwards_are_compiled_behind_all_captures():
    log = []

    class Compiled(Doubler):
        @property
        def compiles(self):
            log.append("compile")
            return True

    nodes = {}
    for name in ("one", "two"):
        node = nodes[name] = Compiled(CaptureConfig(WALK, Shapes(rows=(1,))))
        node.compute = lambda x: log.append("compute") or x * 2
    engine = StepEngine(CpuBackend(capture="tape"))
    engine.load_model(nodes, ())
    log.clear()
    assert [sizes(report) for report in engine.warm_up().values()] == [[(1, 1)]] * 2
    first = log.index("compile")
    assert "compute" in log[:first]
    assert log[first:] == ["compile"] * 2


def test_dropped_captures_are_made_again():
    bench = Bench(Doubler(SMALL))
    bench.open(a=3.0)
    bench.engine.drop_captures()
    bench.step("a")
    assert bench.node.eager == [("a",)]
    assert sizes(bench.engine.warm_up()[NODE]) == [(2, 2), (1, 1)]
    bench.step("a")
    assert bench.node.eager == [("a",)]
    assert bench.seen() == {"a": [6.0, 6.0]}
    bench.engine.release(frozenset({"anything"}))
    assert bench.engine.reserve_slot(bench.batch("a")) is None


def test_defect_8_6_11_autocast_is_the_nodes_in_captured_and_eager_steps():
    seen: list[torch.dtype] = []

    class Cast(Doubler):
        autocast_dtype = torch.bfloat16

    def compute(x):
        product = x[:, None] @ torch.full((1, 1), 2.0)
        seen.append(product.dtype)
        return product[:, 0].float()

    node = Cast(CaptureConfig(WALK, Shapes(rows=(1,))))
    node.compute = compute
    bench = Bench(node)
    bench.open(a=1.0, b=2.0)
    bench.step("a")
    bench.step("a", "b")
    assert node.eager == [("a", "b")]
    assert set(seen) == {torch.bfloat16}
    assert bench.seen() == {"a": [2.0, 2.0], "b": [4.0]}
