"""Where a job is, said alike in memory, to whoever follows it, in discovery and in the journal."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from phalanx.roles.coordination.board import PhaseBoard
from phalanx.roles.coordination.journal import Journal
from phalanx.roles.coordination.phase_operations import RunningOperation
from phalanx.roles.coordination.record import OperationRecord, Outcome, PhaseState
from phalanx.roles.coordination.schedule import Schedule
from phalanx.roles.coordination.tenants import Tenant
from phalanx.roles.coordination.turns import Turns
from phalanx.schema.job_placement import TRAINER


class PhaseBook:
    """Changed by one coordinator alone."""

    def __init__(
        self,
        schedule: Schedule,
        tenants: Mapping[str, Tenant],
        turns: Turns,
        board: PhaseBoard,
        journal: Journal,
    ) -> None:
        self._schedule = schedule
        self._tenants = tenants
        self._turns = turns
        self._board = board
        self._journal = journal

    @property
    def state(self) -> PhaseState:
        return self._board.state

    def put(self, state: PhaseState) -> None:
        """`state`, with what is true of leases and of the trainer; not written down yet."""
        self._board.set(
            replace(
                state,
                holders=self._turns.leases.holders,
                blocked=self._turns.blocked,
                trainer=self._turns.trainer.record,
            )
        )

    def publish(self) -> None:
        """The phase, in the discovery of every role."""
        for tenant in self._tenants.values():
            tenant.set_phase(self.state.phase)

    def save(self) -> None:
        """Raises as `Journal.write`."""
        self.put(self.state)
        self._journal.write(self.state)

    def save_leases(self) -> None:
        """As `save`, while nobody is answered by it: with the machine those end who have them."""
        self.put(self.state)
        self._journal.write(self.state, sync=False)

    def note(
        self, running: RunningOperation, outcome: Outcome, detail: str = ""
    ) -> tuple[OperationRecord, ...]:
        """As `save`, and what is known of an operation, by each of its ids."""
        self.put(self.state)
        records = tuple(
            OperationRecord(
                operation_id=operation_id, meaning=running.meaning, outcome=outcome, detail=detail
            )
            for operation_id in running.ids
        )
        for record in records:
            self._journal.write(self.state, record, sync=outcome is not Outcome.BEGUN)
        return records

    def settle(self) -> None:
        """Nothing is under way any more: the trainer has no lease without need, and a phase that is
        its alone ends with that.
        """
        self._turns.settle()
        if TRAINER not in self._schedule.bundles or self._turns.leases.holds(TRAINER):
            return
        for phase in self._schedule.phases:
            if phase.name == self.state.phase and phase.roles == (TRAINER,):
                self.put(replace(self.state, phase=None))
                self.publish()
