"""Who has the devices that a job's roles and its trainer share: nobody loads before whoever was there
holds nothing for certain.

Of a job whose roles all stay nothing is shared, and everything here finds nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from phalanx.errors import PhalanxError, RoleOperationFailedError, RoleOperationRefusedError
from phalanx.roles.coordination.leases import LeaseTable
from phalanx.roles.coordination.moves import Moves, Tell, UncertainError
from phalanx.roles.coordination.phase_operations import PhaseBusyError
from phalanx.roles.coordination.presence import Presence
from phalanx.roles.coordination.record import TrainerRecord
from phalanx.roles.coordination.schedule import Schedule
from phalanx.roles.coordination.steps import ACTIVATE, AWAIT, CLEAR, TAKE, Step
from phalanx.roles.coordination.tenants import Tenant
from phalanx.roles.coordination.trainer import Trainer
from phalanx.roles.events import EventKind
from phalanx.schema.job_placement import TRAINER, PhaseSpec
from phalanx.wire.phases import AttachTrainer, Holding, ReleaseTrainer


class Turns:
    """`blocked` says who is uncertain, and keeps anybody from loading anything."""

    def __init__(
        self, schedule: Schedule, tenants: Mapping[str, Tenant], trainer: Trainer, tell: Tell
    ) -> None:
        self._tenants = tenants
        stays = {name: each for name, each in tenants.items() if name not in schedule.bundles}
        self._presence = Presence(stays, tell)
        self._shared = schedule.bundles
        self._tell = tell
        self.trainer = trainer
        self.leases = LeaseTable(schedule.bundles)
        self.blocked: str | None = None
        takes_turns = {name: tenants[name] for name in schedule.bundles if name != TRAINER}
        self._moves = Moves(takes_turns, self.leases, tell)
        if trainer.holding is not Holding.NOTHING and TRAINER in schedule.bundles:
            self.leases.take([TRAINER])

    def holding(self, tenant: str) -> Holding:
        return self.trainer.holding if tenant == TRAINER else self._tenants[tenant].holding()

    def check_free(self, phase: PhaseSpec | None) -> None:
        """Raises `RoleOperationRefusedError` where the phase (None: no phase) cannot come now."""
        if self.blocked is not None:
            raise RoleOperationRefusedError(
                f"the job is blocked: {self.blocked}; `phalanx phase recover` finds out"
            )
        if TRAINER not in self._shared:
            return
        is_its = phase is not None and TRAINER in phase.roles
        record = self.trainer.record
        if is_its and record is None:
            raise RoleOperationRefusedError(
                f"phase {phase.name if phase else None!r} is the trainer's, and no trainer has told"
                " of itself; it does so first: POST /v1/trainer/attach, or PhaseClient.attach"
            )
        if not is_its and self.leases.holds(TRAINER):
            who = "the trainer" if record is None else f"trainer {record.trainer_id!r}"
            raise RoleOperationRefusedError(
                f"{who} holds {', '.join(self.leases.bundles(TRAINER))} and must release them first:"
                " POST /v1/trainer/release, or the end of its process; where it holds nothing, say"
                " so: `phalanx phase recover --holds-nothing trainer`"
            )

    def check_coming(self, phase: PhaseSpec) -> None:
        """Raises `RoleOperationFailedError` where a role that takes no turns does not come by itself."""
        self._presence.check(phase)

    def give_up_waiting(self, meaning: str) -> bool:
        """Have a change that waits for roles fail, as the job is asked for something else. False
        where none waits.
        """
        return self._presence.give_up(meaning)

    async def change(
        self, phase: PhaseSpec, step: Callable[[Step], None], save: Callable[[], None]
    ) -> None:
        """Have the roles of the phase resident, and nobody else; what cannot be completed is undone.

        Raises `UncertainError`, after which the job is blocked, and `RoleOperationFailedError` where
        nobody holds anything. `save` is called with the new leases, before anything is loaded.
        """
        trainer = self.trainer.record
        step(CLEAR)
        await self._clear(phase.roles)
        coming = [name for name in phase.roles if name in self._shared]
        roles = [name for name in coming if name != TRAINER]
        step(TAKE)
        with self._blocking():
            self._moves.take(coming)
        step(ACTIVATE)
        try:
            save()
            await self._moves.fill(roles)
            await self._presence.wait(phase, lambda words: step(AWAIT.saying(words)))
            self._hand_over(coming, trainer)
        except PhalanxError:
            self.settle()
            await self._clear()
            raise

    async def clear(self) -> None:
        """Have every role hold nothing. Raises as `change` does."""
        await self._clear()

    async def recover(self, vouched: Collection[str]) -> None:
        """Make certain what is uncertain; of the `vouched`, somebody's word is taken that they hold
        nothing. Raises `RoleOperationFailedError` where somebody stays uncertain.
        """
        waiting = [] if self.blocked is None else self._role_holders()
        roles = [*waiting, *(name for name in self._moves.uncertain() if name not in waiting)]
        await self._moves.find_out(roles, vouched)
        if TRAINER in vouched:
            self.trainer.now_holds(Holding.NOTHING)
        if self.blocked is None:
            return
        try:
            await self._moves.clear()
        except UncertainError as error:
            self.blocked = str(error)
            raise RoleOperationFailedError(
                f"{error}. `phalanx recover ROLE/MODEL/N` replaces a replica by force, and"
                " `phalanx phase recover --holds-nothing ROLE` takes your word for a role"
            ) from error
        self._unblock()

    def look_again(self) -> bool:
        """Whether what somebody has done to a replica has ended the uncertainty."""
        if self.blocked is not None:
            for name in self._role_holders():
                self._moves.give_up(name)
            if not self._role_holders() and not self._moves.uncertain():
                self._unblock()
                return True
        return False

    def attach(self, asked: AttachTrainer, *, changing: bool) -> None:
        """The trainer tells of itself. `changing`: an operation is under way.

        Raises `RoleOperationRefusedError` where it may not hold what it holds, or is another one.
        """
        started = self.trainer.check_attach(asked)
        self.trainer.check_seen(asked.seen)
        has_it = self.leases.holds(TRAINER)
        if changing and (has_it or (TRAINER in self._shared and asked.holds)):
            raise PhaseBusyError(
                "devices change hands at this moment; give their memory back, and enter the"
                " trainer's phase to have them"
            )
        if TRAINER in self._shared and asked.holds and not has_it:
            self.leases.take([TRAINER])
            devices = ", ".join(self.leases.bundles(TRAINER))
            self._tell(TRAINER, EventKind.LEASE, f"has the lease of {devices}")
        self.trainer.attach(asked, started)
        where = "" if asked.pid is None else f" (pid {asked.pid})"
        self._tell(TRAINER, EventKind.LEASE, f"{asked.trainer_id!r} is the trainer{where}")

    def release(self, asked: ReleaseTrainer) -> None:
        """The trainer holds nothing any more."""
        self.trainer.check_is(asked.trainer_id)
        self.trainer.check_seen(asked.seen)
        self.trainer.now_holds(Holding.NOTHING)

    def settle(self) -> None:
        """Nothing is under way any more: a trainer that holds nothing has no lease."""
        if self.trainer.holding is Holding.NOTHING:
            self._end_trainers_lease("the trainer holds nothing")

    async def _clear(self, staying: Iterable[str] = ()) -> None:
        with self._blocking():
            await self._moves.clear(staying)

    def block(self, why: str) -> None:
        self.blocked = why
        self._tell("", EventKind.BLOCKED, why)

    def _unblock(self) -> None:
        self._tell("", EventKind.UNBLOCKED, self.blocked or "")
        self.blocked = None

    def _role_holders(self) -> list[str]:
        return [name for name in self.leases.holders if name != TRAINER]

    def _hand_over(self, coming: Iterable[str], asked: TrainerRecord | None) -> None:
        """From the answer on the trainer may have memory there, if it is the one of before."""
        if TRAINER in coming:
            now = self.trainer.record
            if now is None:
                raise RoleOperationFailedError("the trainer has ended before its phase began")
            if asked is None or now.since != asked.since:
                raise RoleOperationFailedError(
                    f"trainer {now.trainer_id!r} has told of itself anew before its phase began; it"
                    " enters it again"
                )
            self.trainer.now_holds(Holding.MEMORY)

    def _blocking(self) -> _Blocking:
        return _Blocking(self)

    def _end_trainers_lease(self, why: str) -> None:
        if self.leases.holds(TRAINER):
            self._moves.give_up(TRAINER, why)


class _Blocking:
    """What stays uncertain in here blocks the job."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, UncertainError):
            self._turns.block(str(error))
