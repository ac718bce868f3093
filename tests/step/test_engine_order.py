"""What the engine calls and in which order, seen by resources that record it."""

from __future__ import annotations

import pytest
import torch

from phalanx.device.cpu import CpuBackend
from phalanx.step.batch import ExecutingBatch
from phalanx.step.declaration import SubmoduleStep
from phalanx.step.engine import StepEngine
from phalanx.step.outcomes import AdmitOutcome, AllocationFailed
from phalanx.step.outputs import NodeOutputs
from phalanx.step.submodule import NodeSubmodule
from phalanx.testing.probe_resource import ProbeSpec, ProbeStep, react_never

NODES = frozenset({"node"})
REFUSED = AdmitOutcome(ok=False, reason=AllocationFailed("no room", 1, "b"))


class Recorder(NodeSubmodule):
    """Declares a step on its probes and writes its own calls into their log."""

    def __init__(self, log, *, batched: bool, keys=("a", "b", "c")) -> None:
        super().__init__()
        self.log = log
        self.batched = batched
        self.keys = keys
        self.declares = True
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.outputs = NodeOutputs()
        self.plans_seen = []
        self.on_preprocess = self.on_forward = lambda: None

    def can_batch(self, walk, rows, inputs):
        return self.batched

    def declare_step(self, walk, rows, inputs):
        if not self.declares:
            return None
        rids = tuple(row.request_id for row in rows)
        self.log.append(("declare", rids))
        return SubmoduleStep((), {key: ProbeStep(rids) for key in self.keys})

    def preprocess(self, engine, inputs):
        self.plans_seen.append(dict(engine.plans))
        self.on_preprocess()
        return tuple(row.request_id for row in engine.rows)

    def forward(self, prepared):
        self.log.append(("forward", prepared))
        self.on_forward()
        return self.outputs


class Bench:
    """An engine of one recorder with three probes: a needs b, b needs c."""

    def __init__(self, *, batched: bool, react=react_never, backend=None) -> None:
        self.log = []
        self.node = Recorder(self.log, batched=batched)
        self.engine = StepEngine(backend or CpuBackend())
        specs = [
            ProbeSpec(key, NODES, self.log, react, frozenset(needs))
            for key, needs in (("a", "b"), ("b", "c"), ("c", ""))
        ]
        self.engine.load_model({"node": self.node}, specs)
        for rid in ("x", "y"):
            self.engine.add_request(rid, None, {})
        self.log.clear()
        self.batch = ExecutingBatch("node", "walk", [self.engine.row(r, 1) for r in ("x", "y")])
        self.engine.prepare_inputs(self.batch)

    def calls(self) -> list[str]:
        """The log as `verb key rids`."""
        return [
            f"{one[0]} {''.join(one[1])}"
            if isinstance(one, tuple)
            else f"{one.verb} {one.key} {''.join(one.request_ids)}"
            for one in self.log
        ]


def test_rule_2_17_1_item_8_5_3_a_batched_step_admits_plans_and_commits_in_dependency_order():
    bench = Bench(batched=True)
    bench.engine.exec(bench.batch)
    bench.engine.finalize(bench.batch)
    assert bench.calls() == [
        "declare xy",
        *(f"admit {key} xy" for key in "cba"),
        *(f"plan {key} xy" for key in "cba"),
        *(f"begin {key} xy" for key in "cba"),
        "forward xy",
        *(f"commit {key} xy" for key in "cba"),
        *(f"publish {key} {rid}" for rid in "xy" for key in "abc"),
    ]
    assert bench.node.plans_seen == [{"c": (), "b": ("c",), "a": ("c", "b")}]


def test_rule_2_17_1_row_by_row_all_are_admitted_before_any_is_planned():
    bench = Bench(batched=False)
    bench.engine.exec(bench.batch)
    expected = []
    for rid in "xy":
        expected += [f"declare {rid}", *(f"admit {key} {rid}" for key in "cba")]
    for rid in "xy":
        expected += [
            *(f"plan {key} {rid}" for key in "cba"),
            *(f"begin {key} {rid}" for key in "cba"),
            f"forward {rid}",
            *(f"commit {key} {rid}" for key in "cba"),
        ]
    assert bench.calls() == expected


@pytest.mark.parametrize("batched", [True, False])
def test_rule_2_17_2_nothing_is_planned_or_committed_if_any_row_is_refused(batched):
    def react(verb, rids):
        return REFUSED if verb == "admit" and "y" in rids else None

    bench = Bench(batched=batched, react=react)
    assert bench.engine.exec(bench.batch) == []
    verbs = [call.split()[0] for call in bench.calls()]
    assert not {"plan", "forward", "commit"} & set(verbs)
    assert bench.batch.admit_error is REFUSED.reason
    assert bench.batch.failed_resource == "c"
    assert bench.batch.outputs == []
    assert bench.batch.failed_requests == {}
    for key in "abc":
        assert not bench.engine.resource(key).in_flight


def test_a_refusal_rolls_back_the_others_last_first():
    answers = iter([None, None, REFUSED])

    def react(verb, rids):
        return next(answers) if verb == "admit" else None

    bench = Bench(batched=True, react=react)
    bench.engine.exec(bench.batch)
    assert bench.batch.failed_resource == "a"
    assert bench.calls()[1:] == [
        *(f"admit {key} xy" for key in "cba"),
        *(f"unadmit {key} xy" for key in "abc"),
    ]
    assert all(not bench.engine.resource(key).in_flight for key in "abc")


def test_rule_2_17_3_commit_is_done_before_outputs_are_copied_and_ready_only_after():
    bench = Bench(batched=True)
    seen = []

    class Watched(NodeOutputs):
        def owned(self):
            committed = "commit a xy" in bench.calls()
            events = (bench.batch.commit_done.is_set(), bench.batch.outputs_ready.is_set())
            seen.append((committed, *events))
            return self

    bench.node.outputs = Watched()
    bench.node.on_forward = lambda: seen.append(bench.batch.commit_done.is_set())
    bench.engine.exec(bench.batch)
    assert seen == [False, (True, True, False)]
    assert bench.batch.outputs_ready.is_set()


@pytest.mark.parametrize("batched", [True, False])
def test_rule_2_17_5_the_launch_is_announced_after_preprocessing_and_before_the_forward(batched):
    bench = Bench(batched=batched)
    seen = []
    bench.node.on_preprocess = lambda: seen.append(bench.batch.launch_started.is_set())
    bench.node.on_forward = lambda: seen.append(bench.batch.launch_started.is_set())
    bench.engine.exec(bench.batch)
    assert seen == ([False, True] if batched else [False, True, True, True])


def test_rule_2_17_5_the_launch_is_announced_also_where_there_is_none():
    bench = Bench(batched=True, react=lambda verb, rids: REFUSED if verb == "admit" else None)
    bench.engine.exec(bench.batch)
    assert bench.batch.admit_error is not None
    assert bench.batch.launch_started.is_set()


def waiters_are_released(batch: ExecutingBatch) -> bool:
    return batch.commit_done.is_set() and batch.outputs_ready.is_set()


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("verb", ["admit", "plan", "commit"])
def test_rule_2_17_3_waiters_are_released_when_a_resource_raises(batched, verb):
    def react(called, rids):
        if called == verb:
            raise ValueError(verb)

    bench = Bench(batched=batched, react=react)
    bench.engine.exec(bench.batch)
    assert waiters_are_released(bench.batch)
    assert {rid: str(error) for rid, error in bench.batch.failed_requests.items()} == {
        "x": verb,
        "y": verb,
    }
    assert all(not bench.engine.resource(key).in_flight for key in "abc")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_rule_2_17_3_waiters_are_released_when_the_forward_raises(error):
    bench = Bench(batched=True)

    def raise_error():
        raise error

    bench.node.on_forward = raise_error
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            bench.engine.exec(bench.batch)
    else:
        bench.engine.exec(bench.batch)
        assert set(bench.batch.failed_requests) == {"x", "y"}
    assert waiters_are_released(bench.batch)


def test_an_empty_batch_runs_nothing():
    bench = Bench(batched=True)
    batch = ExecutingBatch("node", "walk", [])
    bench.engine.prepare_inputs(batch)
    assert bench.engine.exec(batch) == []
    bench.engine.postprocess(batch)
    bench.engine.finalize(batch)
    assert bench.engine.check_stop(batch) == {}
    assert waiters_are_released(batch)
    assert bench.calls() == []


def test_a_node_that_declares_nothing_still_runs():
    bench = Bench(batched=True)
    bench.node.declares = False
    bench.engine.exec(bench.batch)
    assert bench.calls() == ["forward xy"]
    assert bench.batch.failed_requests == {}


def test_a_forward_computes_without_gradients():
    bench = Bench(batched=True)
    modes = []
    bench.node.on_forward = lambda: modes.append(torch.is_inference_mode_enabled())
    bench.engine.exec(bench.batch)
    assert modes == [True]
    assert not bench.node.weight.requires_grad


def test_a_step_runs_in_a_profiling_range_of_its_node():
    names = []

    class Backend(CpuBackend):
        def range(self, name):
            names.append(name)
            return super().range(name)

    bench = Bench(batched=True, backend=Backend())
    bench.engine.exec(bench.batch)
    stages = ("declare", "admit", "plan", "preprocess", "forward", "commit", "collect")
    assert names == ["step.exec.node", *(f"step.{stage}" for stage in stages)]
