"""The one who moves a job from phase to phase: it drains and puts to sleep whoever has had his turn,
and only then lets the next one load.

In a job whose roles take turns nobody else wakes, drains or puts to sleep one of them. In any other
the same calls move nothing, so that one training loop serves all.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from phalanx.clock import Clock
from phalanx.errors import (
    ConfigurationError,
    PhalanxError,
    RoleOperationFailedError,
    RoleOperationRefusedError,
)
from phalanx.roles.coordination.board import PhaseBoard
from phalanx.roles.coordination.book import PhaseBook
from phalanx.roles.coordination.journal import Journal
from phalanx.roles.coordination.order import PhaseOrder
from phalanx.roles.coordination.phase_operations import Act, PhaseOperations, RunningOperation
from phalanx.roles.coordination.record import Outcome
from phalanx.roles.coordination.resuming import resume
from phalanx.roles.coordination.schedule import Schedule
from phalanx.roles.coordination.steps import BEGIN, CLEAR, END, PUBLISH, Step
from phalanx.roles.coordination.tenants import Tenant
from phalanx.roles.coordination.trainer import Processes, Trainer
from phalanx.roles.coordination.turns import Turns
from phalanx.roles.events import EventKind, EventLog
from phalanx.roles.together import all_to_their_ends
from phalanx.schema.job_placement import TRAINER, PhaseSpec
from phalanx.wire.phases import (
    AttachTrainer,
    Enter,
    Leave,
    PhasesDocument,
    Recover,
    ReleaseTrainer,
)


class LifecycleCoordinator:
    """Of one job; belongs to one event loop. Operations run one at a time and go on where their
    caller leaves.

    Each raises `ConfigurationError` for wrong arguments, `RoleOperationRefusedError` where the state
    of the job does not allow it (nothing was begun), and `RoleOperationFailedError` where it did not
    end well.
    """

    def __init__(
        self,
        schedule: Schedule,
        tenants: Mapping[str, Tenant],
        journal: Journal,
        processes: Processes,
        clock: Clock,
        events: EventLog,
    ) -> None:
        """`tenants` are the job's roles by name.

        Raises `ConfigurationError` where the journal cannot be read, or is of a job of another shape
        in the middle of a batch.
        """
        remembered = resume(journal, schedule.shape)
        self._schedule = schedule
        self._tenants = tenants
        self._journal = journal
        self._clock = clock
        self._events = events
        self._order = PhaseOrder(schedule.phases)
        self._operations = PhaseOperations(remembered.operations)
        trainer = Trainer(remembered.state.trainer, processes, self._trainer_ended)
        self._turns = Turns(schedule, tenants, trainer, self._tell)
        self._board = PhaseBoard(schedule, remembered.state)
        self._book = PhaseBook(schedule, tenants, self._turns, self._board, journal)
        self._book.put(remembered.state)
        journal.begin(replace(remembered, state=self._book.state))

    @property
    def document(self) -> PhasesDocument:
        return self._board.document(self._turns)

    async def wait(self, number: int, timeout_s: float) -> PhasesDocument:
        """The document once it has another number than this, or after `timeout_s`."""
        await self._board.wait(number, timeout_s)
        return self.document

    def check_operator(self, role: str, what: str) -> None:
        """Raises `RoleOperationRefusedError` where only the phases of the job may move the role."""
        if role in self._schedule.bundles:
            names = [phase.name for phase in self._schedule.phases if role in phase.roles]
            raise RoleOperationRefusedError(
                f"role {role!r} takes turns on its devices, so only the phases of the job {what}:"
                f" `phalanx phase enter {names[0]} --batch BATCH` wakes it, and `phalanx phase leave`"
                " puts it to sleep"
            )

    def check_lease(self, role: str) -> None:
        """Raises `RoleOperationRefusedError` where the role may not load anything now."""
        if role in self._schedule.bundles:
            self._turns.leases.check(role)

    async def enter(self, asked: Enter) -> PhasesDocument:
        """Go to a phase. Answered when its roles serve, or when the trainer may have its devices.

        A role that takes no turns is waited for, while it starts or comes back by itself.
        """
        self._order.index(asked.phase)
        meaning = f"enter {asked.phase!r} of batch {asked.batch!r}"

        def begin() -> tuple[RunningOperation, Act]:
            index = self._order.check(self._book.state, asked.phase, asked.batch)
            phase = self._order.phases[index]
            self._turns.check_free(phase)
            self._turns.check_coming(phase)
            return self._operation(meaning, phase.name, lambda: self._enter(asked, phase, index))

        await self._operations.run(asked.operation_id, meaning, begin)
        return self.document

    async def leave(self, asked: Leave) -> PhasesDocument:
        """To no phase: every role that takes turns gives its memory back. Whoever waits for a role
        to come waits no longer.
        """
        meaning = "give the batch up and leave its phase" if asked.abandon else "leave the phase"

        def begin() -> tuple[RunningOperation, Act]:
            self._turns.check_free(None)
            return self._operation(meaning, None, lambda: self._leave(asked))

        give_up = self._turns.give_up_waiting
        await self._operations.run(asked.operation_id, meaning, begin, give_up)
        return self.document

    async def recover(self, asked: Recover) -> PhasesDocument:
        """Find out what everybody holds of whom nobody is certain, and free it.

        Raises `RoleOperationFailedError` where somebody stays uncertain.
        """
        known = [*self._tenants, TRAINER]
        for name in asked.holds_nothing:
            if name not in known:
                raise ConfigurationError(
                    f"holds_nothing={name!r} is neither a role nor the trainer; allowed:"
                    f" {', '.join(known)}"
                )
        vouched = ", ".join(sorted(set(asked.holds_nothing)))
        meaning = "recover" + (f" on the word that {vouched} holds nothing" if vouched else "")

        def begin() -> tuple[RunningOperation, Act]:
            if TRAINER in asked.holds_nothing:
                self._turns.trainer.check_seen(asked.seen)
            return self._operation(meaning, None, lambda: self._recover(asked))

        await self._operations.run(asked.operation_id, meaning, begin)
        return self.document

    def attach(self, asked: AttachTrainer) -> PhasesDocument:
        """The trainer tells of itself, and whether it has memory on its devices."""
        self._turns.attach(asked, changing=self._is_changing)
        self._trainer_got()
        self._save_trainer()
        return self.document

    def release(self, asked: ReleaseTrainer) -> PhasesDocument:
        """The trainer has given its memory back: its lease ends."""
        self._turns.release(asked)
        self._save_trainer()
        return self.document

    def look_again(self) -> None:
        """Somebody has done something to a replica, which may have ended an uncertainty."""
        if not self._is_changing and self._turns.look_again():
            self._book.save()

    async def end(self) -> None:
        """No operation begins any more, and what runs is cancelled: what it has begun is to be
        stopped by whoever stops the roles. The trainer is still heard.
        """
        await self._operations.close()

    async def close(self) -> None:
        """As `end`, and nothing is written down any more."""
        await self.end()
        self.abandon()

    def abandon(self) -> None:
        """Watch nobody and write nothing any more, where nothing has begun."""
        self._turns.trainer.close()
        self._journal.close()
        self._board.close()

    @property
    def _is_changing(self) -> bool:
        return self._operations.running is not None

    def _operation(
        self, meaning: str, target: str | None, act: Act
    ) -> tuple[RunningOperation, Act]:
        running = RunningOperation(meaning, target, self._clock.wall_s())
        return running, lambda: self._perform(running, act)

    async def _perform(self, running: RunningOperation, act: Act) -> None:
        self._step(BEGIN)
        try:
            self._note(running, Outcome.BEGUN)
            self._tell("", EventKind.PHASE, f"{running.meaning}: begun")
            await act()
            self._book.settle()
            self._note(running, Outcome.DONE)
            self._tell("", EventKind.PHASE, f"{running.meaning}: done")
        except PhalanxError as error:
            self._tell("", EventKind.PHASE, f"{running.meaning}: failed: {error}")
            self._book.settle()
            self._note(running, Outcome.FAILED, str(error))
            raise
        finally:
            self._board.show_end()

    async def _enter(self, asked: Enter, phase: PhaseSpec, index: int) -> None:
        if self._schedule.takes_turns:
            self._book.put(replace(self._book.state, phase=None))
        try:
            await self._turns.change(phase, self._step, self._book.save_leases)
        except PhalanxError:
            self._book.publish()
            raise
        if TRAINER in phase.roles:
            self._trainer_got()
        self._step(PUBLISH)
        self._book.put(
            replace(
                self._book.state,
                phase=phase.name,
                batch=asked.batch,
                reached=index,
                abandoned=False,
            )
        )
        self._book.publish()
        await all_to_their_ends(
            self._tenants[name].heard() for name in phase.roles if name in self._tenants
        )
        self._step(END)

    async def _leave(self, asked: Leave) -> None:
        self._step(CLEAR)
        self._book.put(replace(self._book.state, phase=None))
        self._book.publish()
        await self._turns.clear()
        if asked.abandon:
            state = self._book.state
            self._book.put(replace(state, abandoned=state.batch is not None))

    async def _recover(self, asked: Recover) -> None:
        self._step(CLEAR)
        await self._turns.recover(asked.holds_nothing)

    def _trainer_ended(self, why: str) -> None:
        """It has ended by itself: the dead hold nothing."""
        self._tell(TRAINER, EventKind.LEASE, why)
        try:
            self._save_trainer()
        except RoleOperationFailedError as error:
            # Nobody has asked for it, and the next start finds out by itself.
            self._tell(TRAINER, EventKind.FAILED, str(error))

    def _trainer_got(self) -> None:
        self._turns.trainer.got(self._book.state.number + 1)

    def _save_trainer(self) -> None:
        if not self._is_changing:
            self._book.settle()
        self._book.save()

    def _tell(self, tenant: str, kind: EventKind, words: str) -> None:
        self._events.add(tenant, kind, detail=words)

    def _step(self, step: Step) -> None:
        running = self._operations.running
        assert running is not None
        self._board.show_step(running, step)

    def _note(self, running: RunningOperation, outcome: Outcome, detail: str = "") -> None:
        for record in self._book.note(running, outcome, detail):
            self._operations.note(record)
