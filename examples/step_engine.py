"""A model of one node and one resource of its own, driven by the step loop.

Each request counts up from a number; the node keeps the running sum in a slot of a tensor. There are
two slots and three requests, so that one of them waits for a slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.device import create_backend
from phalanx.loop.request import Work
from phalanx.loop.scheduler import Budget
from phalanx.loop.step_loop import StepLoop
from phalanx.step.declaration import ResourceStep, StepContext, SubmoduleStep
from phalanx.step.engine import StepEngine
from phalanx.step.outcomes import ADMITTED, AdmitOutcome, AllocationFailed
from phalanx.step.outputs import Column, HostRow, NodeOutputs
from phalanx.step.resources.base import BuildInfo, Resource, ResourceConfig, ResourceSpec
from phalanx.step.submodule import EngineInputs, NodeSubmodule, StepRow


@dataclass(frozen=True)
class SumsSpec(ResourceSpec):
    """Declares the resource: the engine builds it once, for all nodes that it names."""

    num_slots: int

    def build(self, info: BuildInfo) -> Sums:
        return Sums(self.key, self.num_slots, info)


@dataclass(frozen=True)
class SumsStep(ResourceStep):
    """What the node asks of it in one step: slots for these requests."""

    request_ids: tuple[str, ...]


class Sums(Resource):
    """One number a request, in a slot that it keeps until it ends."""

    def __init__(self, key: str, num_slots: int, info: BuildInfo) -> None:
        self.key = key
        self.values = info.backend.zeros((num_slots,), torch.int64)
        self.current: list[int] = []
        self._free = list(range(num_slots))
        self._slots: dict[str, int] = {}

    def admit(self, step: ResourceStep, ctx: StepContext) -> AdmitOutcome:
        assert isinstance(step, SumsStep)
        fresh = [rid for rid in step.request_ids if rid not in self._slots]
        short = len(fresh) - len(self._free)
        if short > 0:  # an answer, not an exception: the loop makes room and tries again
            reason = AllocationFailed(f"{short} slots too few", short, fresh[-1])
            return AdmitOutcome(ok=False, reason=reason)
        for rid in fresh:
            self._slots[rid] = self._free.pop()
        ctx.reservations[self.key] = fresh
        return ADMITTED

    def unadmit(self, step: ResourceStep, ctx: StepContext) -> None:
        for rid in ctx.reservations.pop(self.key, ()):
            self.remove_request(rid)

    def plan(self, step: ResourceStep, ctx: StepContext) -> list[int]:
        assert isinstance(step, SumsStep)
        return [self._slots[rid] for rid in step.request_ids]

    def begin(self, step: ResourceStep, ctx: StepContext) -> None:
        self.current = ctx.plan_results[self.key]

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        ctx.reservations.pop(self.key, None)

    def remove_request(self, rid: str) -> None:
        slot = self._slots.pop(rid, None)
        if slot is not None:
            self.values[slot] = 0
            self._free.append(slot)

    def at_rest(self) -> bool:
        return len(self._free) == len(self.values)


class Adder(NodeSubmodule):
    """Adds each row's number to its sum: one forward for all rows."""

    def bind_node_resources(self, resources: Mapping[str, Resource]) -> None:
        sums = resources["sums"]
        assert isinstance(sums, Sums)
        self.sums = sums

    def prepare_inputs(self, walk: str, row: StepRow) -> int:
        number: int = row.info.state.number
        return number

    def can_batch(self, walk: str, rows: Sequence[StepRow], inputs: Sequence[Any]) -> bool:
        return True

    def declare_step(
        self, walk: str, rows: Sequence[StepRow], inputs: Sequence[Any]
    ) -> SubmoduleStep:
        rids = tuple(row.request_id for row in rows)
        return SubmoduleStep((), {"sums": SumsStep(rids)})

    def preprocess(
        self, engine: EngineInputs, inputs: Sequence[Any]
    ) -> tuple[tuple[str, ...], torch.Tensor]:
        return tuple(row.request_id for row in engine.rows), torch.tensor(inputs)

    def forward(self, prepared: tuple[tuple[str, ...], torch.Tensor]) -> NodeOutputs:
        rids, numbers = prepared
        slots = torch.tensor(self.sums.current)
        self.sums.values[slots] += numbers
        return NodeOutputs({"sum": Column(rids, self.sums.values[slots])})

    def check_stop(self, row: StepRow, outputs: HostRow) -> frozenset[str]:
        row.info.state.sums.append(outputs["sum"])
        return frozenset()


class CountUp:
    """A request: what it wants next, and what it has got so far."""

    def __init__(self, first: int, count: int) -> None:
        self.first = first
        self.count = count
        self.sums: list[int] = []

    @property
    def number(self) -> int:
        return self.first + len(self.sums)

    def next_work(self) -> Work | None:
        done = len(self.sums)
        return None if done == self.count else Work("adder", "count", 1, done + 1)

    def resource_configs(self) -> Mapping[str, ResourceConfig]:
        return {}

    def advance(self, span: int) -> None:
        """The outputs tell all there is to know."""

    def adopt(self, num_tokens: int) -> None:
        """Nothing of a sum can be taken over from another request."""

    def push_back(self) -> None:
        self.sums.clear()  # its slot is gone: it counts again from its first number

    def take_delta(self) -> int | None:
        return self.sums[-1] if self.sums else None

    def output(self, *, cancelled: bool) -> tuple[int, ...]:
        return tuple(self.sums)


def main() -> None:
    engine = StepEngine(create_backend("cpu"))
    engine.load_model({"adder": Adder()}, [SumsSpec("sums", frozenset({"adder"}), num_slots=2)])
    loop = StepLoop(engine, Budget(max_step_tokens=8, max_running=8))
    for rid, first in (("a", 1), ("b", 10), ("c", 100)):
        loop.start(rid, CountUp(first, count=3))
    while loop.busy:
        for event in loop.tick():
            print(event)
    assert engine.at_rest()


if __name__ == "__main__":
    main()
