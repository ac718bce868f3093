"""Regions: reserved with the step around them, replayed inside its forward, committed with it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from phalanx.device.cpu import CpuBackend
from phalanx.step.declaration import Segment, SubmoduleStep
from phalanx.step.graphs.capture_config import CaptureConfig
from phalanx.step.graphs.region_config import RegionConfig
from phalanx.step.graphs.shapes import Shapes
from phalanx.step.outcomes import AdmitOutcome, AllocationFailed
from phalanx.step.outputs import Column, NodeOutputs
from phalanx.step.resources.kv_cache import KVConfig, KVSpec, KVStep
from phalanx.testing.probe_resource import ProbeSpec, ProbeStep
from tests.step.graphs.nodes import NODE, WALK, Bench, Doubler, LoggedBackend

NODES = frozenset({NODE})
FULL = AdmitOutcome(ok=False, reason=AllocationFailed("full", 1, "a"))


class Nested(Doubler):
    """Doubles outside and, in a region, adds ten to every token and counts them by row."""

    def __init__(
        self,
        *configs: CaptureConfig,
        before_step: bool = False,
        inner: str | None = "inner",
        shapes: Shapes | None = None,
    ) -> None:
        super().__init__(*configs, probe=True)
        self.before_step = before_step
        self.inner = inner
        self.shapes = shapes or Shapes(rows=(2, 4), token_buckets=(4, 8))
        self.runs = 1
        self.fail = False
        self.around: list[list[str]] = []
        self.staged: list[torch.Tensor] = []

    def regions(self):
        return [
            RegionConfig(
                label="middle",
                compute=self._middle,
                static_inputs=lambda rows, tokens: {
                    "x": torch.full((tokens,), 5.0),
                    "rows": torch.zeros(rows),
                },
                declare_step=self._inner_step,
                shapes=self.shapes,
                token_outputs=frozenset({"added"}),
                lease_before_step=self.before_step,
            )
        ]

    def _middle(self, inputs):
        return {"added": inputs["x"] + 10.0, "rows": inputs["rows"] + 1.0}

    def _inner_step(self, rids, spans):
        if self.inner is None:
            return None
        segments = tuple(map(Segment, rids, spans))
        step = KVStep(segments) if self.inner == "kv" else ProbeStep(tuple(rids))
        return SubmoduleStep(segments, {self.inner: step})

    def declare_around(self, walk, rows, inputs, leased):
        self.around.append(sorted(leased))
        return self.declare_step(walk, rows, inputs)

    def preprocess(self, engine, inputs):
        return engine.regions, super().preprocess(engine, inputs)

    def forward(self, prepared):
        if isinstance(prepared, Mapping):
            return super().forward(prepared)
        regions, (rids, x) = prepared
        if "middle" not in regions:
            self.eager.append(rids)
            return NodeOutputs({"y": Column(rids, (x + 10.0)[: len(rids)] * 2)})
        for _ in range(self.runs):
            made = regions["middle"].run({"x": x, "rows": torch.ones(len(rids))})
        assert made["added"].shape == x.shape
        assert made["rows"].tolist() == [2.0] * len(rids)
        if self.fail:
            raise RuntimeError("behind the region")
        return NodeOutputs({"y": Column(rids, made["added"][: len(rids)] * 2)})


def bench_of(node: Nested, backend=None, react=None, log=None) -> Bench:
    log = [] if log is None else log
    inner = ProbeSpec("inner", NODES, log, **({"react": react} if react else {}))
    outer = ProbeSpec("probe", NODES, log)
    made = Bench(node, inner, outer, backend=backend or CpuBackend(capture="tape"))
    made.open(a=1.0, b=2.0, c=3.0)
    log.clear()
    return made


def calls(log) -> list[str]:
    return [f"{one.verb} {one.key}" for one in log if one.verb not in ("publish", "ingest")]


def test_a_region_replays_inside_an_eager_forward():
    backend = LoggedBackend()
    bench = bench_of(Nested(), backend)
    assert {bucket.region for bucket in bench.report.captured} == {"middle"}
    backend.log.clear()
    bench.step("a", "b")
    assert backend.log.count("replay") == 1
    assert bench.node.eager == []
    assert bench.seen() == {"a": [22.0], "b": [24.0], "c": []}
    bench.close()


def test_a_regions_step_is_admitted_with_the_step_around_it_and_committed_with_it():
    log: list = []
    bench = bench_of(Nested(), log=log)
    bench.step("a", "b")
    assert calls(log) == [
        "admit probe",
        "admit inner",
        "plan probe",
        "begin probe",
        "plan inner",
        "begin inner",
        "commit probe",
        "commit inner",
    ]
    bench.close()


def test_defect_8_6_7_a_region_without_room_refuses_the_step_and_not_the_forward():
    log: list = []
    refusing: list = []
    react = lambda verb, rids: FULL if verb == "admit" and refusing else None  # noqa: E731
    bench = bench_of(Nested(), react=react, log=log)
    refusing.append(None)
    batch = bench.step("a", "b")
    assert (batch.admit_error, batch.failed_resource) == (FULL.reason, "inner")
    assert (batch.failed_requests, batch.outputs) == ({}, [])
    assert not bench.engine.resource("probe").in_flight, "the step around it is undone"
    refusing.clear()
    bench.step("a", "b")
    assert bench.seen()["a"] == [22.0]
    bench.close()


def test_pages_of_a_region_are_reserved_before_its_forward_begins():
    node = Nested(inner="kv")
    config = KVConfig(1, 1, 2, 2, 4, 16, torch.float32)
    bench = Bench(node, KVSpec("kv", NODES, config), ProbeSpec("probe", NODES))
    bench.open(a=1.0, b=2.0, c=3.0)
    bench.step("a", "b")
    batch = bench.step("a", "b", "c")
    assert batch.failed_resource == "kv"
    assert batch.failed_requests == {}
    cache = bench.engine.resource("kv")
    assert (cache.stored_len("a"), cache.stored_len("c")) == (1, 0)
    bench.close()


def test_a_forward_that_fails_behind_a_region_commits_nothing_of_it():
    log: list = []
    bench = bench_of(Nested(), log=log)
    bench.node.fail = True
    batch = bench.step("a")
    assert str(batch.failed_requests["a"]) == "behind the region"
    assert "commit inner" not in calls(log)
    assert not bench.engine.resource("inner").in_flight
    bench.node.fail = False
    bench.close()


def test_a_region_runs_as_often_as_its_forward_likes_and_commits_once():
    log: list = []
    bench = bench_of(Nested(), log=log)
    bench.node.runs = 3
    bench.step("a")
    assert calls(log).count("commit inner") == 1
    assert calls(log).count("plan inner") == 1
    assert bench.seen()["a"] == [22.0]


def test_what_a_region_computed_is_overwritten_by_no_other_run():
    class Twice(Nested):
        def forward(self, prepared):
            regions, (rids, x) = prepared
            runs = [
                regions["middle"].run({"x": x + more, "rows": torch.ones(len(rids))})
                for more in (0.0, 100.0)
            ]
            return NodeOutputs({"y": Column(rids, runs[0]["added"])})

    bench = bench_of(Twice())
    bench.step("a", "b")
    assert bench.seen() == {"a": [11.0], "b": [12.0], "c": []}


def test_a_region_that_does_not_run_is_given_back():
    class Shy(Nested):
        def forward(self, prepared):
            return super().forward(({}, prepared[1]))

    log: list = []
    bench = bench_of(Shy(), log=log)
    bench.step("a")
    assert "unadmit inner" in calls(log)
    assert "commit inner" not in calls(log)
    bench.close()


@pytest.mark.parametrize("before_step", [True, False])
def test_the_step_around_sees_the_leases_that_were_taken_before_it(before_step):
    bench = bench_of(Nested(before_step=before_step))
    bench.step("a", "b")
    assert bench.node.around == [["middle"] if before_step else []]


def test_rows_that_fit_no_shape_run_without_the_region():
    bench = bench_of(Nested())
    bench.step("a", "b", "c", span=3)
    assert bench.node.eager == [("a", "b", "c")]
    assert bench.seen()["a"] == [22.0]
    bench.close()


def test_a_captured_forward_has_its_regions_in_it():
    class Whole(Nested):
        def preprocess(self, engine, inputs):
            assert (engine.lease is None) != (engine.regions == {})
            return Doubler.preprocess(self, engine, inputs)

    whole = Whole(CaptureConfig(WALK, Shapes(rows=(2,))))
    log: list = []
    bench = bench_of(whole, log=log)
    batch = bench.step("a", "b")
    assert batch.lease is not None
    assert not [call for call in calls(log) if call.endswith("inner")]
    assert bench.node.around == []


def test_what_is_behind_a_regions_inputs_is_zero():
    bench = bench_of(Nested())
    (region,) = bench.engine._nodes[NODE].graphs._regions.values()
    bench.step("a", "b", "c", span=2)
    bench.step("c")
    inputs = [
        one.inputs["x"] for captured in region.captures._made.values() for one in captured.values()
    ]
    narrow = min(inputs, key=len)
    assert narrow.tolist() == [3.0, 0.0, 0.0, 0.0]


def test_a_region_and_the_step_around_it_cannot_share_a_resource():
    bench = bench_of(Nested(inner="probe"))
    batch = bench.step("a")
    assert "both use resources ['probe']" in str(batch.failed_requests["a"])
    assert not bench.engine.resource("probe").in_flight


def test_a_region_that_needs_nothing_is_replayed_all_the_same():
    bench = bench_of(Nested(inner=None))
    bench.step("a")
    assert bench.seen()["a"] == [22.0]


def test_regions_and_steps_take_slots_of_one_count():
    node = Nested(CaptureConfig("other", Shapes(rows=(1,))))
    bench = bench_of(node)
    (region,) = bench.engine._nodes[NODE].graphs._regions.values()
    taken = [region.lease([("a", 1)]).slot, region.lease([("a", 1)]).slot]
    batch = bench.batch("a", walk="other")
    assert len(set(taken)) == 2
    assert bench.engine.reserve_slot(batch).slot == taken[0]


def test_an_output_that_is_no_row_a_row_says_so():
    class Wrong(Nested):
        def _middle(self, inputs):
            return {"added": inputs["x"], "rows": inputs["x"]}

    bench = bench_of(Wrong())
    error = bench.step("a").failed_requests["a"]
    assert "output 'rows' of region 'middle'" in str(error)
    assert "token_outputs" in str(error)
