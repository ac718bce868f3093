"""How one batch runs: as one forward or row by row, everything reserved before anything computes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from phalanx.device.base import DeviceBackend
from phalanx.errors import CaptureMismatchError, RequestFailedError
from phalanx.step.attempt import attempt
from phalanx.step.batch import ExecutingBatch
from phalanx.step.graphs.node_graphs import NodeGraphs
from phalanx.step.outcomes import RefusalReason, StepOutcome
from phalanx.step.outputs import NodeOutputs, checked
from phalanx.step.preplanning import PrePlanning
from phalanx.step.reserving import Reserving
from phalanx.step.runner import StepRunner
from phalanx.step.submodule import EngineInputs, NodeSubmodule
from phalanx.step.unit import StepUnit


def _reason(refused: StepOutcome, unit: StepUnit) -> RefusalReason:
    """Why a unit was refused; a reason for all its rows names the one there is."""
    reason = refused.outcome.reason
    assert reason is not None, f"{refused.failed_resource!r} refused without a reason"
    if reason.request_id is None and len(unit.rows) == 1:
        return replace(reason, request_id=unit.rows[0].request_id)
    return reason


class StepExecution:
    """One step of one node. Failures and a refusal are left on the batch."""

    def __init__(
        self,
        batch: ExecutingBatch,
        submodule: NodeSubmodule,
        reserving: Reserving,
        preplanning: PrePlanning,
        graphs: NodeGraphs,
        runner: StepRunner,
        backend: DeviceBackend,
    ) -> None:
        self._batch = batch
        self._submodule = submodule
        self._reserving = reserving
        self._preplanning = preplanning
        self._runner = runner
        self._graphs = graphs
        self._range = backend.range

    def run(self) -> list[NodeOutputs]:
        """Reserve for all rows, then compute and commit; the outputs of the rows that came through."""
        return [part for unit in self._admitted() for part in self._drive(unit)]

    def _admitted(self) -> list[StepUnit]:
        """The batch as units that hold what they reserved; none at all if one was refused.

        Rows whose own declaration or reservation raises are failed and left out.
        """
        batch = self._batch
        promoted = self._preplanning.promote(batch)
        if promoted is not None:
            return [promoted]
        if not batch.rows:
            return []
        assert batch.inputs is not None, "prepare_inputs comes before exec"
        lease = attempt(partial(self._graphs.lease, batch)).value
        whole = StepUnit.of(batch.walk, batch.rows, batch.inputs, lease)
        pending = [whole] if batch.shares_forward else whole.split()
        admitted: list[StepUnit] = []
        while pending:
            unit = pending.pop(0)
            made = attempt(partial(self._reserving.reserve, unit))
            if made.value is None:
                self._reserving.unadmit(unit)
                if len(unit.rows) > 1 and not isinstance(made.error, CaptureMismatchError):
                    pending = unit.split() + pending
                else:
                    self._fail(unit, made.error)
            elif made.value.ok:
                admitted.append(unit)
            else:
                for earlier in admitted:
                    self._reserving.unadmit(earlier)
                batch.register_admit_error(_reason(made.value, unit), made.value.failed_resource)
                return []
        return admitted

    def _fail(self, unit: StepUnit, error: Exception | None) -> None:
        assert error is not None
        for row in unit.rows:
            self._batch.register_failure(row.request_id, error)

    def _drive(self, unit: StepUnit) -> list[NodeOutputs]:
        """Plan, compute and commit one admitted unit.

        If computing fails, nothing was committed: its rows run one by one, so that only the culprit
        fails. A commit that fails leaves state nobody can trust and takes all rows of the unit.
        """
        computed = attempt(partial(self._compute, unit))
        if computed.value is None:
            self._reserving.unadmit(unit)
            if len(unit.rows) > 1:
                return [part for row in unit.split() for part in self._drive_alone(row)]
            self._fail(unit, computed.error)
            return []
        committed = attempt(partial(self._commit, unit))
        if committed.error is not None:
            self._reserving.unadmit(unit)
            self._fail(unit, committed.error)
            return []
        return [computed.value]

    def _drive_alone(self, unit: StepUnit) -> list[NodeOutputs]:
        """Declare, admit and drive one row of a unit that failed as a whole."""
        made = attempt(partial(self._reserving.reserve, unit))
        if made.value is not None and made.value.ok:
            return self._drive(unit)
        self._reserving.unadmit(unit)
        refusal = None if made.value is None else made.value.outcome.reason
        self._fail(unit, made.error or RequestFailedError(f"refused on its own: {refusal}"))
        return []

    def _compute(self, unit: StepUnit) -> NodeOutputs:
        batch, submodule, graphs = self._batch, self._submodule, self._graphs
        if unit.step is not None:
            with self._range("step.plan"):
                graphs.await_free(unit.context.lease)
                self._runner.plan(unit.step, unit.context)
                self._runner.begin(unit.step, unit.context)
        lease = unit.context.lease
        given = EngineInputs(
            batch.walk, unit.rows, unit.step, unit.context.plan_results, lease, unit.regions
        )
        with self._range("step.preprocess"):
            prepared = submodule.preprocess(given, unit.inputs)
        if lease is not None:
            with self._range("step.replay"):
                outputs = self._graphs.replay(lease, prepared, batch.launch_started)
            receivers = {} if unit.step is None else unit.step.receivers
            return outputs.of_rows(unit.context.request_ids, receivers)
        forward = graphs.forward_batched if batch.running_batched else graphs.forward
        batch.launch_started.set()
        with self._range("step.forward"):
            return checked(forward(prepared), batch.node)

    def _commit(self, unit: StepUnit) -> None:
        with self._range("step.commit"):
            if unit.step is not None:
                self._runner.commit(unit.step, unit.context)
            for region in unit.regions.values():
                region.commit()
