"""A check that a node computes each request as if it were alone, whoever else is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.device.cpu import CpuBackend
from phalanx.loop.driving.threads import StepThreads
from phalanx.loop.pipelined_loop import PipelinedLoop
from phalanx.loop.request import RequestState
from phalanx.loop.scheduler import Budget
from phalanx.loop.step_loop import StepLoop
from phalanx.schema.events import Failed, Final
from phalanx.step.engine import StepEngine
from phalanx.testing.conformance import ConformanceError, require
from phalanx.testing.model_parts import ModelParts
from phalanx.testing.watched_node import (
    FaultStage,
    NodeFault,
    StruckError,
    WatchedNode,
    watched,
)

MAX_TICKS = 10_000
_BUDGET = Budget(max_step_tokens=4096, max_running=64)
_SHORT = Budget(max_step_tokens=3, max_running=64)


@dataclass(frozen=True)
class SubmoduleCase:
    """How the check uses a model.

    `parts` returns new nodes, and resources with room for all requests at once. Each of `requests`
    makes the same request anew; at least two, of several steps each. Outputs may differ by
    `tolerance`, absolute and relative; with 0 they are equal to the bit. `capture` is the way in which
    nodes that have captures are captured on a CPU; "off" where their operators cannot be.
    """

    parts: Callable[[], ModelParts]
    requests: Sequence[Callable[[], RequestState]]
    tolerance: float = 0.0
    capture: str = "tape"

    def __post_init__(self) -> None:
        require(len(self.requests) >= 2, "case: the check needs at least two requests")


def check_submodule(case: SubmoduleCase) -> None:
    """Run requests of a model alone, together, in other orders, captured, cancelled, pushed back and
    failing, or raise `ConformanceError`.
    """
    alone = _Outputs(case.tolerance, [_Bed(case).outputs([rid])[rid] for rid in _rids(case)])
    alone.compare(_alone_again(case), "determinism: alone a second time")
    _check_together(case, alone)
    _check_reuse(case, alone)
    _check_cancel(case, alone)
    _check_push_back(case, alone)
    for stage in FaultStage:
        _check_fault(case, alone, stage)
    _check_captured(case, alone)


def _rids(case: SubmoduleCase) -> list[str]:
    return [f"r{index}" for index in range(len(case.requests))]


class _Bed:
    """A loop on new nodes, each of them watched."""

    def __init__(
        self,
        case: SubmoduleCase,
        *,
        budget: Budget = _BUDGET,
        batched: bool = True,
        fault: NodeFault | None = None,
        capture: str = "off",
        pipelined: bool = False,
    ) -> None:
        self._case = case
        parts = case.parts()
        self.nodes: Mapping[str, WatchedNode] = {
            name: watched(node, batched=batched, fault=fault)
            for name, node in parts.submodules.items()
        }
        backend = CpuBackend(capture=capture)
        self.engine: StepEngine = ModelParts(self.nodes, parts.specs).engine(backend)
        self.reports = self.engine.warm_up() if capture != "off" else {}
        driver = StepThreads(self.engine) if pipelined else None
        self._pipelined = PipelinedLoop(self.engine, budget, driver=driver) if pipelined else None
        self.loop = self._pipelined or StepLoop(self.engine, budget)
        self.ended: dict[str, Final | Failed] = {}

    def start(self, rid: str) -> None:
        self.loop.start(rid, self._case.requests[int(rid[1:])]())

    def tick(self) -> None:
        for event in self.loop.tick():
            if isinstance(event, (Final, Failed)):
                self.ended[event.rid] = event

    def finish(self) -> None:
        """Tick until everybody has ended; then the engine is at rest."""
        for _ in range(MAX_TICKS):
            if not self.loop.busy:
                break
            self.tick()
        if self._pipelined is not None:
            self._pipelined.close()
        require(self.loop.idle, f"progress: requests have not ended after {MAX_TICKS} ticks")
        require(
            self.engine.at_rest(), "at rest: all requests have ended, and a resource holds more"
        )

    def output(self, rid: str) -> object:
        event = self.ended[rid]
        if isinstance(event, Failed):
            raise ConformanceError(f"{rid!r} failed: {event.error!r}") from event.error
        return event.payload

    def outputs(self, rids: Sequence[str], *, apart: int = 0) -> dict[str, object]:
        """What these requests give, started in this order, so many ticks `apart`."""
        for rid in rids:
            self.start(rid)
            for _ in range(apart):
                self.tick()
        self.finish()
        return {rid: self.output(rid) for rid in rids}


@dataclass(frozen=True)
class _Outputs:
    """What each request must give."""

    tolerance: float
    expected: Sequence[object]

    def compare(self, found: Mapping[str, object], where: str) -> None:
        for rid, output in found.items():
            expected = self.expected[int(rid[1:])]
            if not _close(output, expected, self.tolerance):
                raise ConformanceError(f"{where}, {rid!r} gives {output!r}, alone {expected!r}")


def _close(one: Any, other: Any, tolerance: float) -> bool:  # noqa: ANN401
    """Equal, or, for numbers at any depth, within the tolerance."""
    match one, other:
        case Tensor(), Tensor():
            same = one.shape == other.shape and one.dtype == other.dtype
            return same and torch.allclose(one, other, rtol=tolerance, atol=tolerance)
        case float(), float():
            return abs(one - other) <= tolerance + tolerance * abs(other)
        case ((list() | tuple()), (list() | tuple())):
            pairs = zip(one, other, strict=False)
            return len(one) == len(other) and all(_close(a, b, tolerance) for a, b in pairs)
        case dict(), dict():
            same = one.keys() == other.keys()
            return same and all(_close(one[key], other[key], tolerance) for key in one)
    return bool(one == other)


def _alone_again(case: SubmoduleCase) -> dict[str, object]:
    return {rid: _Bed(case).outputs([rid])[rid] for rid in _rids(case)}


def _check_together(case: SubmoduleCase, alone: _Outputs) -> None:
    rids = _rids(case)
    orders = {"together": rids, "in reverse order": rids[::-1], "in turn": [*rids[1:], rids[0]]}
    for name, order in orders.items():
        alone.compare(_Bed(case).outputs(order), f"batching: {name}")
    alone.compare(_Bed(case).outputs(rids, apart=1), "batching: started one after another")
    alone.compare(_Bed(case, budget=_SHORT).outputs(rids), "batching: in chunks of few tokens")
    alone.compare(_Bed(case, batched=False).outputs(rids), "row by row")
    alone.compare(_Bed(case, pipelined=True).outputs(rids), "planned ahead")


def _check_reuse(case: SubmoduleCase, alone: _Outputs) -> None:
    bed, rids = _Bed(case), _rids(case)
    for rid, other in zip(rids, reversed(rids), strict=True):
        # The same id for another request.
        bed.loop.start(rid, case.requests[int(other[1:])]())
    bed.finish()
    alone.compare(bed.outputs(rids), "cleanup: a request with the id of an ended one")


def _check_cancel(case: SubmoduleCase, alone: _Outputs) -> None:
    rids = _rids(case)
    for num_ticks in (1, 2):
        for victim in (rids[0], rids[-1]):
            bed = _Bed(case)
            for rid in rids:
                bed.start(rid)
            for _ in range(num_ticks):
                bed.tick()
            bed.loop.cancel(victim)
            bed.finish()
            others = {rid: bed.output(rid) for rid in rids if rid != victim}
            alone.compare(others, f"cancel: {victim!r} was cancelled after {num_ticks} ticks, and")


def _check_push_back(case: SubmoduleCase, alone: _Outputs) -> None:
    for num_ticks in (1, 3):
        bed, rids = _Bed(case), _rids(case)
        for rid in rids:
            bed.start(rid)
        for _ in range(num_ticks):
            bed.tick()
        bed.loop.push_back_all()
        bed.finish()
        found = {rid: bed.output(rid) for rid in rids}
        alone.compare(found, f"push back: all were pushed back after {num_ticks} ticks, and")


def _check_fault(case: SubmoduleCase, alone: _Outputs, stage: FaultStage) -> None:
    rids = _rids(case)
    victim = rids[len(rids) // 2]
    for after in (0, 1):
        where = f"fault in {stage.value}"
        bed = _Bed(case, fault=NodeFault(victim, stage, after))
        for rid in rids:
            bed.start(rid)
        bed.finish()
        event = bed.ended[victim]
        failed = isinstance(event, Failed) and isinstance(event.error, StruckError)
        require(failed, f"{where}: {victim!r} must fail with what was raised, not end in {event!r}")
        others = {rid: bed.output(rid) for rid in rids if rid != victim}
        alone.compare(others, f"{where}: {victim!r} failed, and its neighbour")


def _check_captured(case: SubmoduleCase, alone: _Outputs) -> None:
    bed, rids = _Bed(case, capture=case.capture), _rids(case)
    for name, report in bed.reports.items():
        for bucket, reason in (report.refused or {}).items():
            raise ConformanceError(f"captured: node {name!r} as {bucket}: {reason}")
    if any(report.captured for report in bed.reports.values()):
        alone.compare(bed.outputs(rids), "captured")
        alone.compare(bed.outputs(rids, apart=1), "captured: started one after another")
        ahead = _Bed(case, capture=case.capture, pipelined=True)
        alone.compare(ahead.outputs(rids), "captured and planned ahead")
