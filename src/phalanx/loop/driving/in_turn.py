"""No thread beside the loop's own: what is handed in runs when somebody waits for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from phalanx.loop.driving.base import Pending, compute_step, plan_step_ahead
from phalanx.step.batch import ExecutingBatch
from phalanx.step.engine import StepEngine
from phalanx.step.outputs import NodeOutputs


class Deferred:
    """A `Pending` that runs at its first `result`."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._begun = False

    def done(self) -> bool:
        return self._begun

    def result(self) -> None:
        if not self._begun:
            self._begun = True
            self._call()


class StepsInTurn:
    """A `StepDriver`, see the module: for devices that have computed when a call returns.

    There a step leaves nothing to be done beside it, and two threads would only take turns.
    """

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine

    def compute(self, batch: ExecutingBatch, before: Sequence[NodeOutputs] = ()) -> Pending:
        return Deferred(partial(compute_step, self._engine, batch, before))

    def plan(self, batch: ExecutingBatch, after: ExecutingBatch) -> Pending:
        return Deferred(partial(plan_step_ahead, self._engine, batch, after))

    def await_launch(self, batch: ExecutingBatch) -> None:
        """It is launched when somebody waits for its outputs."""

    def await_commit(self, batch: ExecutingBatch, computed: Pending) -> None:
        computed.result()

    def withdraw(self, pending: Pending) -> bool:
        return not pending.done()

    def close(self) -> None:
        """Nothing runs between two calls."""
