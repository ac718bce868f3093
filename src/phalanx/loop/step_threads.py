"""Two threads beside the loop's own: one computes steps, one after another, one plans the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from phalanx.step.batch import ExecutingBatch
from phalanx.step.engine import StepEngine
from phalanx.step.outputs import NodeOutputs

T = TypeVar("T")


class StepThreads:
    """See the module. What a step raises is raised by its future's `result`.

    Both threads see the configuration and the mesh of the thread that hands them work.
    """

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        self._steps = ThreadPoolExecutor(1, thread_name_prefix="phalanx-step")
        self._plans = ThreadPoolExecutor(1, thread_name_prefix="phalanx-plan")

    def compute(self, batch: ExecutingBatch, before: Sequence[NodeOutputs] = ()) -> Future[None]:
        """Compute a prepared batch behind all that was handed in; `before` is what the step before
        it gave, for rows that were prepared ahead.
        """
        return _submit(self._steps, lambda: self._compute(batch, before))

    def plan(self, batch: ExecutingBatch, after: ExecutingBatch) -> Future[None]:
        """Plan a prepared batch ahead as soon as `after` is committed, if it comes to that."""
        return _submit(self._plans, lambda: self._plan(batch, after))

    def close(self) -> None:
        """Wait for what is in hand and end both threads."""
        self._plans.shutdown()
        self._steps.shutdown()

    def _compute(self, batch: ExecutingBatch, before: Sequence[NodeOutputs]) -> None:
        engine = self._engine
        try:
            engine.thread_outputs(batch, before)
            engine.exec(batch)
            if batch.admit_error is None:
                engine.postprocess(batch)
            engine.finalize(batch)
        finally:
            batch.release_waiters()

    def _plan(self, batch: ExecutingBatch, after: ExecutingBatch) -> None:
        after.commit_done.wait()
        if after.admit_error is None and not after.failed_requests:
            self._engine.pre_plan(batch)


def _submit(threads: ThreadPoolExecutor, call: Callable[[], T]) -> Future[T]:
    return threads.submit(copy_context().run, call)
