"""Small captured nodes for tests, engines around them, and a backend that tells what it was asked."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx.device.cpu import CpuBackend, CpuEvent
from phalanx.device.graph import Computation, DeviceGraph
from phalanx.step.batch import ExecutingBatch
from phalanx.step.declaration import Segment, SubmoduleStep
from phalanx.step.engine import StepEngine
from phalanx.step.graphs.capture_config import CaptureConfig
from phalanx.step.outputs import Column, NodeOutputs
from phalanx.step.resources.base import ResourceSpec
from phalanx.step.submodule import EngineInputs, NodeSubmodule, StepRow
from phalanx.testing.probe_resource import ProbeStep

NODE, WALK = "doubler", "double"


@dataclass
class Number:
    """A request's state: its number, and the key that it wants to be computed by."""

    value: float
    key: Hashable = None
    seen: list[float] = field(default_factory=list)


class Doubler(NodeSubmodule):
    """Doubles each row's number. Its hooks may be told to disagree with each other."""

    def __init__(self, *configs: CaptureConfig, probe: bool = False) -> None:
        super().__init__()
        self._configs = configs
        self._probe = probe
        self.eager: list[tuple[str, ...]] = []
        self.declared_key: Callable[[Hashable], Hashable] = lambda key: key
        self.compute: Callable[[Tensor], Tensor] = lambda x: x * 2
        self.input_size: Callable[[int, int], int] = lambda rows, tokens: tokens
        self.skip: set[str] = set()
        self.limit: int | None = None
        self.receivers: Callable[[tuple[str, ...]], dict[str, tuple[str, ...]]] = lambda rids: {}

    def capture_configs(self) -> Sequence[CaptureConfig]:
        return self._configs

    def capture_key(self, walk: str, rows: Sequence[StepRow]) -> Hashable:
        keys = [row.info.state.key for row in rows if row.info.state.key is not None]
        return keys[0] if keys else None

    def static_inputs(self, walk: str, rows: int, tokens: int, key: Hashable) -> dict[str, Tensor]:
        return {"x": torch.full((self.input_size(rows, tokens),), -1.0)}

    def max_batch_size(self, walk: str) -> int | None:
        return self.limit

    def prepare_inputs(self, walk: str, row: StepRow) -> float | None:
        return None if row.request_id in self.skip else row.info.state.value

    def can_batch(self, walk, rows, inputs) -> bool:
        return True

    def declare_capture(self, walk: str, key: Hashable) -> SubmoduleStep:
        return self._step((), key)

    def declare_step(self, walk, rows, inputs) -> SubmoduleStep:
        segments = tuple(Segment(row.request_id, row.span) for row in rows)
        return self._step(segments, self.declared_key(self.capture_key(walk, rows)))

    def _step(self, segments: tuple[Segment, ...], key: Hashable) -> SubmoduleStep:
        rids = tuple(segment.request_id for segment in segments)
        probed = {"probe": ProbeStep(rids)} if self._probe else {}
        return SubmoduleStep(segments, probed, key, self.receivers(rids))

    def preprocess(self, engine: EngineInputs, inputs):
        spans = [row.span for row in engine.rows]
        x = torch.repeat_interleave(torch.tensor(inputs), torch.tensor(spans))
        rids = tuple(row.request_id for row in engine.rows)
        return {"x": x} if engine.lease is not None else (rids, x)

    def forward(self, prepared) -> NodeOutputs:
        if isinstance(prepared, Mapping):
            return NodeOutputs({"y": Column.by_row(self.compute(prepared["x"]))})
        rids, x = prepared
        self.eager.append(rids)
        return NodeOutputs({"y": Column(rids, self.compute(x)[: len(rids)])})

    def check_stop(self, row, outputs):
        if "y" in outputs:
            row.info.state.seen.append(outputs["y"])
        return frozenset()


class LoggedGraph:
    """A graph that tells when it is captured and replayed."""

    def __init__(self, graph: DeviceGraph, log: list[str]) -> None:
        self._graph = graph
        self._log = log

    def capture(self, compute: Computation) -> Mapping[str, Tensor]:
        outputs = self._graph.capture(compute)
        self._log.append("capture " + " ".join(str(len(one)) for one in outputs.values()))
        return outputs

    def replay(self) -> None:
        self._log.append("replay")
        self._graph.replay()


class LoggedBackend(CpuBackend):
    """A CPU that captures on tapes and tells of graphs and events."""

    def __init__(self, capture: str = "tape") -> None:
        super().__init__(capture=capture)
        self.log: list[str] = []

    def create_graph(self) -> LoggedGraph:
        return LoggedGraph(super().create_graph(), self.log)

    def wait_event(self, event) -> None:
        self.log.append("wait")

    def record_event(self) -> CpuEvent:
        self.log.append("record")
        return super().record_event()


class Bench:
    """An engine of one node, warm, with requests that hold a number each."""

    def __init__(
        self,
        node: NodeSubmodule,
        *specs: ResourceSpec,
        backend: CpuBackend | None = None,
        num_slots: int = 2,
        node_name: str = NODE,
    ) -> None:
        self.node = node
        self.name = node_name
        self.engine = StepEngine(backend or CpuBackend(capture="tape"), num_slots=num_slots)
        self.engine.load_model({node_name: node}, specs)
        self.report = self.engine.warm_up()[node_name]
        self.numbers: dict[str, Number] = {}

    def open(self, **values: float | Number) -> None:
        for rid, value in values.items():
            number = value if isinstance(value, Number) else Number(value)
            self.numbers[rid] = number
            self.engine.add_request(rid, number, {})

    def batch(self, *rids: str, walk: str = WALK, span: int = 1) -> ExecutingBatch:
        return ExecutingBatch(self.name, walk, [self.engine.row(rid, span) for rid in rids])

    def run(self, batch: ExecutingBatch) -> ExecutingBatch:
        self.engine.prepare_inputs(batch)
        self.engine.exec(batch)
        if batch.admit_error is None:
            self.engine.check_stop(batch)
        self.engine.finalize(batch)
        return batch

    def step(self, *rids: str, walk: str = WALK, span: int = 1) -> ExecutingBatch:
        return self.run(self.batch(*rids, walk=walk, span=span))

    def seen(self) -> dict[str, list[float]]:
        return {rid: number.seen for rid, number in self.numbers.items()}

    def close(self) -> None:
        for rid in self.numbers:
            self.engine.remove_request(rid)
        assert self.engine.at_rest()
