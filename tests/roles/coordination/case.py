"""A coordinator on fakes: tenants that share devices, a journal and processes, in one log."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine

from phalanx.roles.coordination.coordinator import LifecycleCoordinator
from phalanx.roles.coordination.journal import Journal
from phalanx.roles.coordination.schedule import Schedule, schedule_of
from phalanx.roles.coordination.tenants import RoleTenant
from phalanx.roles.events import EventLog
from phalanx.schema.job_placement import TRAINER, PhaseSpec
from phalanx.schema.roles import PlacementMode
from phalanx.testing.clock import ManualClock
from phalanx.testing.phase_fakes import FakeProcesses, FakeTenant, MemoryJournal
from phalanx.testing.role_faults import Fault, Faults
from phalanx.testing.virtual_time import run_virtual
from phalanx.wire.phases import (
    AttachTrainer,
    Enter,
    Holding,
    Leave,
    PhasesDocument,
    Recover,
    ReleaseTrainer,
)

ROLES = ("rollout", "genrm", "teacher")
PHASES = (*(PhaseSpec(role, (role,)) for role in ROLES), PhaseSpec("train", (TRAINER,)))
BUNDLES = {name: ("n0:0", "n0:1") for name in (*ROLES, TRAINER)}
DEFER = Schedule(PlacementMode.DEFER, PHASES, BUNDLES)
SPLIT = Schedule(PlacementMode.SPLIT, PHASES)
PID = 77


class Phases:
    """`restart` is a new control process with the same journal and processes: its roles hold nothing."""

    def __init__(self, schedule: Schedule = DEFER, journal: Journal | None = None) -> None:
        self.schedule = schedule
        self.journal = MemoryJournal() if journal is None else journal
        self.processes = FakeProcesses()
        self.processes.start(PID)
        self.faults = Faults()
        self.log: list[str] = []
        self._ids = itertools.count(1)
        self.begin()

    def begin(self) -> None:
        clock = ManualClock()
        self.events = EventLog(clock)
        self.tenants = {role: FakeTenant(role, self.faults, self.log) for role in ROLES}
        self.coordinator = LifecycleCoordinator(
            self.schedule, self.tenants, self.journal, self.processes, clock, self.events
        )

    async def restart(self) -> None:
        await self.coordinator.close()
        self.begin()

    @property
    def document(self) -> PhasesDocument:
        return self.coordinator.document

    @property
    def holders(self) -> set[str]:
        return {view.holder for view in self.document.leases if view.holder}

    async def enter(self, phase: str, batch: str = "1", operation_id: str = "") -> PhasesDocument:
        return await self.coordinator.enter(Enter(phase, batch, operation_id or self.new_id()))

    async def leave(self, *, abandon: bool = False, operation_id: str = "") -> PhasesDocument:
        return await self.coordinator.leave(Leave(operation_id or self.new_id(), abandon))

    async def recover(self, *holds_nothing: str, operation_id: str = "") -> PhasesDocument:
        return await self.coordinator.recover(Recover(operation_id or self.new_id(), holds_nothing))

    def attach(self, trainer_id: str = "t", *, holds: bool = False, pid: int | None = PID) -> None:
        self.coordinator.attach(AttachTrainer(trainer_id, holds, pid))

    def release(self, trainer_id: str = "t") -> None:
        self.coordinator.release(ReleaseTrainer(trainer_id))

    async def up_to(self, phase: str, batch: str = "1") -> None:
        """Every phase of the batch, as far as this one."""
        for each in self.schedule.phases:
            await self.enter(each.name, batch)
            if each.name == phase:
                return

    async def amid(
        self,
        call: str,
        operation: Coroutine[object, object, PhasesDocument],
        fault: Fault = Fault.SLOW,
    ) -> asyncio.Task[PhasesDocument]:
        """An operation that is in the middle of a tenant's `call`, which goes so."""
        self.faults.next(call, [fault])
        running = asyncio.create_task(operation)
        await until(self.log, call)
        return running

    def new_id(self) -> str:
        return f"op-{next(self._ids)}"

    def really_resident(self) -> list[str]:
        resident = [name for name, tenant in self.tenants.items() if tenant.really_holds]
        return resident + ([TRAINER] if self.document.trainer_holding is Holding.MEMORY else [])

    def told(self) -> list[str]:
        """The events, in order."""
        return [f"{event.role} {event.detail}".strip() for event in self.events.after(0)]


async def trainer_on_its_way(
    fault: Fault = Fault.SLOW,
) -> tuple[Phases, asyncio.Task[PhasesDocument]]:
    """Its phase was asked for, and the last scorer, which goes so, has not given its memory back."""
    p = Phases()
    p.attach()
    await p.up_to("teacher")
    return p, await p.amid("deactivate teacher", p.enter("train"), fault)


async def until(log: list[str], words: str) -> None:
    while words not in log:  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0.001)


def run(scenario: Callable[[], Coroutine[object, object, None]]) -> None:
    run_virtual(scenario())


def plain_coordinator(managers, clock, events) -> LifecycleCoordinator:
    """Of a job whose roles all stay, without a file or a process."""
    return LifecycleCoordinator(
        schedule_of(None, [manager.spec for manager in managers.values()]),
        {name: RoleTenant(manager) for name, manager in managers.items()},
        MemoryJournal(),
        FakeProcesses(),
        clock,
        events,
    )
