"""Nodes that compute a number from their inputs, for walks of any shape, and how to run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from phalanx.device.cpu import CpuBackend
from phalanx.loop.scheduler import Budget
from phalanx.loop.step_loop import StepLoop
from phalanx.loop.walks import (
    EMIT_TO_CLIENT,
    NOWHERE,
    Edge,
    Emitted,
    FinishedWalk,
    NextWalk,
    Partition,
    WalkModel,
    WalkNode,
    WalkProgram,
    WalkRequest,
)
from phalanx.schema.events import Delta, Failed, Final
from phalanx.step.declaration import SubmoduleStep
from phalanx.step.engine import StepEngine
from phalanx.step.outputs import Column, NodeOutputs
from tests.loop.walks.tally import PRIME, TallySpec, TallyStep

STAGES = ("prepare", "declare", "preprocess", "forward", "postprocess", "check_stop")


class Struck(RuntimeError):
    """What a fault raises."""


@dataclass
class Numbers:
    """A request: the inputs of its first walk, and where it fails: (stage, node, after so many runs
    of this node). `kept` is what had persisted when each walk ended."""

    inputs: Mapping[str, int]
    fault: tuple[str, str, int] | None = None
    first: str = "w"
    iterations: Mapping[str, int] = field(default_factory=dict)
    kept: list[dict[str, tuple[int, ...]]] = field(default_factory=list)
    num_runs: dict[str, int] = field(default_factory=dict)

    def strike(self, stage: str, node: str) -> None:
        if self.fault is not None and self.fault[:2] == (stage, node):
            if self.num_runs.get(node, 0) >= self.fault[2]:
                raise Struck(f"{stage} of {node}")


def number(ident: int, tally: int, inputs: Sequence[Sequence[int]]) -> int:
    """What a node gives for the values of its inputs, in their order."""
    total = 17 + ident * 1009 + tally * 7
    for i, values in enumerate(inputs):
        total += (i + 1) * sum((j + 3) * value for j, value in enumerate(values))
    return total % PRIME


class NumberNode(WalkNode):
    """All its outputs are the same number. It ends the loop `ends` where that is a multiple of 5."""

    read_on_host = frozenset({"number"})

    def __init__(
        self, name: str, ident: int, outputs: Sequence[Edge], ends: str = "", stateful: bool = True
    ) -> None:
        super().__init__()
        self.name, self.ident, self.ends, self.stateful = name, ident, ends, stateful
        self.outputs = {edge.name for edge in outputs} | {"number"}
        self.batch_sizes: list[int] = []

    def bind_node_resources(self, resources) -> None:
        self.tally = resources.get("tally")

    def can_batch(self, walk, rows, inputs):
        return True

    def prepare_inputs(self, walk, row):
        given = super().prepare_inputs(walk, row)
        given.request.strike("prepare", self.name)
        return given

    def declare_step(self, walk, rows, inputs):
        for given in inputs:
            given.request.strike("declare", self.name)
        if self.tally is None:
            return None
        step = TallyStep(self.name, tuple(row.request_id for row in rows))
        return SubmoduleStep((), {"tally": step})

    def preprocess(self, engine, inputs):
        for given in inputs:
            given.request.strike("preprocess", self.name)
        return [row.request_id for row in engine.rows], inputs

    def forward(self, prepared):
        rids, inputs = prepared
        numbers = []
        for rid, given in zip(rids, inputs, strict=True):
            given.request.strike("forward", self.name)
            tally = 0 if self.tally is None else self.tally.value(rid, self.name)
            # The same order as the declaration's.
            values = [[int(one) for one in given.tensors[name]] for name in sorted(given.tensors)]
            numbers.append(number(self.ident, tally, values))
            if self.tally is not None:
                self.tally.staged[rid, self.name] = numbers[-1]
        self.batch_sizes.append(len(rids))
        column = Column(tuple(rids), torch.tensor(numbers))
        return NodeOutputs({name: column for name in sorted(self.outputs)})

    def postprocess(self, row, outputs):
        row.info.state.request.strike("postprocess", self.name)
        super().postprocess(row, outputs)

    def check_stop(self, row, outputs):
        request = row.info.state.request
        request.strike("check_stop", self.name)
        request.num_runs[self.name] = request.num_runs.get(self.name, 0) + 1
        return super().check_stop(row, outputs)

    def ended_loops(self, inputs, outputs):
        return frozenset({self.ends} if self.ends and outputs["number"] % 5 == 0 else ())


class NumberModel(WalkModel):
    """Begins with walk `w` of partition `p`, and does it once more with what persisted."""

    def first_walks(self, request: Numbers):
        return {"p": self._walk(request, 0)}

    def next_walk(self, request: Numbers, finished: FinishedWalk):
        kept = {name: tuple(map(int, values)) for name, values in finished.tensors.items()}
        request.kept.append(kept)
        if len(request.kept) == 2:
            return None
        return self._walk(request, sum(sum(values) for values in kept.values()))

    def _walk(self, request: Numbers, plus: int) -> NextWalk:
        given = {name: torch.tensor(one + plus) for name, one in request.inputs.items()}
        return NextWalk(request.first, given, request.iterations)

    def take_delta(self, request, emitted):
        return by_name(emitted)

    def output(self, request, emitted, *, cancelled):
        return by_name(emitted)


class Once(NumberModel):
    """One walk a request."""

    def next_walk(self, request, finished):
        super().next_walk(request, finished)
        request.finished = finished
        return None


def emit(name: str) -> Edge:
    return Edge(EMIT_TO_CLIENT, name)


def keep(name: str) -> Edge:
    return Edge(NOWHERE, name, persist=True)


def by_name(emitted: Sequence[Emitted]) -> dict[str, list[int]]:
    """Numbers by the name of their edge, in order."""
    found: dict[str, list[int]] = {}
    for one in emitted:
        found.setdefault(one.name, []).append(int(one.tensor))
    return found


class Run:
    """A loop over number nodes, whose requests' events are kept and checked."""

    def __init__(
        self,
        partitions: Sequence[Partition],
        nodes: Mapping[str, NumberNode],
        model: WalkModel | None = None,
        budget: Budget = Budget(64, 8),
    ) -> None:
        stateful = frozenset(name for name, node in nodes.items() if node.stateful)
        specs = [TallySpec("tally", stateful)] if stateful else []
        self.engine = StepEngine(CpuBackend())
        self.engine.load_model(nodes, specs)
        self.nodes = nodes
        self.program = WalkProgram(partitions, nodes.keys(), specs)
        self.model = model or NumberModel()
        self.loop = StepLoop(self.engine, budget)
        self.live: set[str] = set()
        self.deltas: dict[str, dict[str, list[int]]] = {}
        self.ended: dict[str, Final | Failed] = {}

    def start(self, rid: str, request: object) -> None:
        self.live.add(rid)
        self.deltas[rid] = {}
        self.loop.start(rid, WalkRequest(self.program, self.model, request))

    def tick(self) -> None:
        for event in self.loop.tick():
            assert event.rid in self.live, f"{event} of a request that is not live"
            if isinstance(event, Delta):
                for name, values in event.payload.items():
                    self.deltas[event.rid].setdefault(name, []).extend(values)
            elif isinstance(event, (Final, Failed)):
                self.live.remove(event.rid)
                self.ended[event.rid] = event

    def finish(self, max_ticks: int = 5000) -> None:
        for _ in range(max_ticks):
            if not self.loop.busy:
                break
            self.tick()
        assert not self.live
        assert self.loop.idle
        assert self.engine.at_rest()

    def output(self, rid: str):
        event = self.ended[rid]
        if isinstance(event, Failed):
            raise event.error
        assert event.payload == self.deltas[rid] or not self.deltas[rid]
        return event.payload


def outcome(run: Run, request: Numbers):
    """What a request gives."""
    run.start("r", request)
    run.finish()
    return run.output("r")
