"""Who computes and plans the steps that a loop has prepared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from phalanx.step.batch import ExecutingBatch
from phalanx.step.engine import StepEngine
from phalanx.step.outputs import NodeOutputs


class Pending(Protocol):
    """Work that was handed in."""

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        ...

    def result(self) -> None:
        """Return when it has ended; raises what escaped from it."""
        ...


class StepDriver(Protocol):
    """Computes steps one after another, in the order in which they are handed in.

    The configuration and the mesh of the thread that hands work in hold for it.
    """

    def compute(self, batch: ExecutingBatch, before: Sequence[NodeOutputs] = ()) -> Pending:
        """Compute a prepared batch; `before` is what the step before it gave, for rows that were
        prepared ahead.
        """
        ...

    def plan(self, batch: ExecutingBatch, after: ExecutingBatch) -> Pending:
        """Plan a prepared batch ahead once `after` is committed, if it comes to that."""
        ...

    def await_launch(self, batch: ExecutingBatch) -> None:
        """Keep out of the way until the forward of a batch in `compute` is launched."""
        ...

    def await_commit(self, batch: ExecutingBatch, computed: Pending) -> None:
        """Return when a batch in `compute` is committed, or is not going to be."""
        ...

    def withdraw(self, pending: Pending) -> bool:
        """True where work that nobody wants any more has not begun, and will not; else wait for
        its end. Which of the two never depends on how fast a thread was.
        """
        ...

    def close(self) -> None:
        """Wait for what has begun, and begin nothing more; may be repeated."""
        ...


def compute_step(engine: StepEngine, batch: ExecutingBatch, before: Sequence[NodeOutputs]) -> None:
    """One whole step, to the point where its outputs are there."""
    try:
        engine.thread_outputs(batch, before)
        engine.exec(batch)
        if batch.admit_error is None:
            engine.postprocess(batch)
        engine.finalize(batch)
    finally:
        batch.release_waiters()


def plan_step_ahead(engine: StepEngine, batch: ExecutingBatch, after: ExecutingBatch) -> None:
    """Plan a batch, if the step before it went through."""
    if after.admit_error is None and not after.failed_requests:
        engine.pre_plan(batch)
