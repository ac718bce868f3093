"""Two threads beside the loop's own: one computes steps, one after another, one plans the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from functools import partial
from typing import TypeVar

from phalanx.loop.driving.base import Pending, compute_step, plan_step_ahead
from phalanx.step.batch import ExecutingBatch
from phalanx.step.engine import StepEngine
from phalanx.step.outputs import NodeOutputs

T = TypeVar("T")


class StepThreads:
    """A `StepDriver`, see the module: for devices that compute while the host goes on."""

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        self._steps = ThreadPoolExecutor(1, thread_name_prefix="phalanx-step")
        self._plans = ThreadPoolExecutor(1, thread_name_prefix="phalanx-plan")

    def compute(self, batch: ExecutingBatch, before: Sequence[NodeOutputs] = ()) -> Pending:
        return _submit(self._steps, partial(compute_step, self._engine, batch, before))

    def plan(self, batch: ExecutingBatch, after: ExecutingBatch) -> Pending:
        return _submit(self._plans, partial(self._plan, batch, after))

    def await_launch(self, batch: ExecutingBatch) -> None:
        batch.launch_started.wait()

    def await_commit(self, batch: ExecutingBatch, computed: Pending) -> None:
        batch.commit_done.wait()

    def withdraw(self, pending: Pending) -> bool:
        assert isinstance(pending, Future)
        wait([pending])
        return False

    def close(self) -> None:
        self._plans.shutdown()
        self._steps.shutdown()

    def _plan(self, batch: ExecutingBatch, after: ExecutingBatch) -> None:
        after.commit_done.wait()
        plan_step_ahead(self._engine, batch, after)


def _submit(threads: ThreadPoolExecutor, call: Callable[[], T]) -> Future[T]:
    return threads.submit(copy_context().run, call)
