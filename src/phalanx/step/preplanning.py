"""Admits and plans a batch's step before its turn, into a context that the batch keeps.

A resource that cannot plan ahead plans when the step's turn comes. Whatever goes wrong ahead of
time is undone and said by nobody: the step is declared again in its turn, and reports it then.
"""

from __future__ import annotations

from functools import partial

from phalanx.device.base import DeviceBackend, DeviceEvent, DeviceStream
from phalanx.step.attempt import attempt
from phalanx.step.batch import ExecutingBatch
from phalanx.step.graphs.node_graphs import NodeGraphs
from phalanx.step.reserving import Reserving
from phalanx.step.runner import StepRunner
from phalanx.step.unit import StagedStep, StepUnit


class PrePlanning:
    """See the module. Of one node; `stage` may run while the step before is still computed."""

    def __init__(
        self,
        reserving: Reserving,
        runner: StepRunner,
        backend: DeviceBackend,
        stream: DeviceStream,
        graphs: NodeGraphs,
    ) -> None:
        """Plans are made on `stream`, where no forward runs."""
        self._reserving = reserving
        self._runner = runner
        self._backend = backend
        self._stream = stream
        self._graphs = graphs

    def stage(self, batch: ExecutingBatch) -> bool:
        """Admit and plan a batch whose inputs are prepared; False, and nothing is held, if it
        cannot be done now. Rows that do not share a forward are never planned ahead.
        """
        self.unstage(batch)
        lease = attempt(partial(self._graphs.lease, batch)).value
        if not batch.rows or not batch.shares_forward:
            return False
        assert batch.inputs is not None, "prepare_inputs comes before pre_plan"
        unit = StepUnit.of(batch.walk, batch.rows, batch.inputs, lease)
        made = attempt(partial(self._planned, unit))
        if made.value is None:
            self._reserving.unadmit(unit)
            return False
        batch.staged = StagedStep(unit, made.value)
        return True

    def promote(self, batch: ExecutingBatch) -> StepUnit | None:
        """The staged unit, with the inputs that the batch has now; None if there is none, or it
        was for other rows and is undone.
        """
        staged = batch.staged
        if staged is None:
            return None
        if batch.preplan_is_stale:
            self.unstage(batch)
            return None
        assert batch.inputs is not None
        batch.staged = None
        batch.promoted = staged.unit
        staged.unit.rows, staged.unit.inputs = batch.rows, batch.inputs
        self._backend.wait_event(staged.planned)
        return staged.unit

    def unstage(self, batch: ExecutingBatch) -> None:
        """Forget what was staged and give back what it held."""
        staged, batch.staged = batch.staged, None
        if staged is not None:
            # Its plans may still be on their way into a slot that is planned into anew.
            self._backend.wait_event(staged.planned)
            self._reserving.unadmit(staged.unit)

    def _planned(self, unit: StepUnit) -> DeviceEvent | None:
        """Reserve and plan; None where nothing is declared or something is refused."""
        outcome = self._reserving.reserve(unit)
        if unit.step is None or not outcome.ok or not outcome.outcome.ready:
            return None
        backend = self._backend
        with backend.range("step.pre_plan"), backend.on_stream(self._stream):
            self._graphs.await_free(unit.context.lease)
            self._runner.plan_ahead(unit.step, unit.context)
            return backend.record_event()
