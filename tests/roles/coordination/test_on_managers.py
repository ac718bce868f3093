"""The coordinator on real managers with fake engines: what happens on every device, in which order."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from phalanx.errors import RoleOperationFailedError, RoleOperationRefusedError
from phalanx.roles.config import parse_job
from phalanx.roles.contracts import ALL_TAGS
from phalanx.roles.coordination.coordinator import LifecycleCoordinator
from phalanx.roles.coordination.leased import leased
from phalanx.roles.coordination.schedule import schedule_of
from phalanx.roles.coordination.tenants import RoleTenant
from phalanx.roles.events import EventKind, EventLog
from phalanx.roles.manager import InferenceManager
from phalanx.roles.publication import initial_content
from phalanx.routing.roles.registry import RoleRegistry
from phalanx.schema.job_placement import TRAINER
from phalanx.testing.clock import ManualClock
from phalanx.testing.phase_fakes import FakeProcesses, MemoryJournal
from phalanx.testing.role_fakes import FakeRoleWorld
from phalanx.testing.role_faults import Fault
from phalanx.testing.virtual_time import run_virtual
from phalanx.wire.phases import AttachTrainer, Enter, Holding, Recover, ReleaseTrainer

FILE = """
placement: {mode: defer, nodes: 1, devices_per_node: 2, trainer_devices: 2}
roles:
  rollout:
    deployment: {drain_timeout_s: 30, offload_timeout_s: 20, startup_timeout_s: 60}
    models: {student: {model: m, replicas: 2, weight_source: local}}
  genrm: {models: {judge: {model: m, ranks: 2}}}
  teacher: {models: {big: {model: m, fault_tolerance: true}}}
"""


class WatchedLog(EventLog):
    """Whatever happens, nobody is on a device with somebody else."""

    def __init__(self, clock, check) -> None:
        super().__init__(clock)
        self._check = check

    def add(self, role, kind, **how) -> None:
        super().add(role, kind, **how)
        self._check()


class World:
    def __init__(self, *, says: bool = True) -> None:
        job = parse_job(FILE, "job.yaml")
        clock = ManualClock()
        self.plan = job.plan
        self.engines = FakeRoleWorld(says=says, keeps_weights=True)
        self.events = WatchedLog(clock, self.check)
        self.overlaps: list[str] = []
        self.coordinator: LifecycleCoordinator | None = None
        self.managers = {
            spec.role: InferenceManager(
                spec,
                leased(self.engines.backends, spec.role, self._check_lease),
                RoleRegistry(spec.role, "e", initial_content(spec)),
                clock,
                self.events,
            )
            for spec in job.roles
        }
        self.processes = FakeProcesses()
        self.processes.start(7)
        self.coordinator = LifecycleCoordinator(
            schedule_of(job.plan, job.roles),
            {name: RoleTenant(manager) for name, manager in self.managers.items()},
            MemoryJournal(),
            self.processes,
            clock,
            self.events,
        )
        self._ids = itertools.count()

    def _check_lease(self, role: str) -> None:
        self.coordinator.check_lease(role)

    async def enter(self, phase: str, batch: str = "1") -> None:
        await self.coordinator.enter(Enter(phase, batch, f"op {next(self._ids)}"))

    async def recover(self, *names: str) -> None:
        await self.coordinator.recover(Recover(f"op {next(self._ids)}", names))

    def resident(self) -> dict[str, set[str]]:
        """Who really has memory on each device."""
        found: dict[str, set[str]] = {}
        if self.coordinator is not None:
            if self.coordinator.document.trainer_holding is not Holding.NOTHING:
                for bundle in self.plan.bundles_of(TRAINER):
                    found.setdefault(str(bundle), set()).add(TRAINER)
        for replica in self.plan.replicas:
            engines = [
                engine
                for (engine_id, _), engine in self.engines.engines.items()
                if engine_id == replica.engine_id and engine.is_up and engine.held
            ]
            for bundle in self.plan.bundles(replica) if engines else ():
                found.setdefault(str(bundle), set()).add(replica.role)
        return found

    def check(self) -> None:
        for bundle, users in self.resident().items():
            if len(users) > 1:
                self.overlaps.append(f"{bundle}: {sorted(users)}")

    def told(self) -> list[str]:
        """Every change of a state, a lease or a phase."""
        kinds = (EventKind.STATE, EventKind.LEASE, EventKind.PHASE)
        return [
            " ".join(filter(None, (event.role, event.engine_id, event.detail)))
            for event in self.events.after(0)
            if event.kind in kinds
        ]

    async def end(self) -> None:
        await self.coordinator.close()
        await asyncio.gather(*(manager.shutdown(0.0) for manager in self.managers.values()))
        assert self.overlaps == []
        assert self.engines.misused == []


def test_i91_the_events_of_a_batch_are_in_the_order_of_the_rfc():
    async def scenario():
        w = World()
        w.coordinator.attach(AttachTrainer("t", False, 7))
        for phase in ("rollout", "genrm", "teacher", "train"):
            await w.enter(phase)
        w.coordinator.release(ReleaseTrainer("t"))
        told = w.told()
        second = told.index("enter 'genrm' of batch '1': begun")
        both = "node-0:0, node-0:1"
        assert told[second:] == [
            "enter 'genrm' of batch '1': begun",
            "rollout student/0 draining",
            "rollout student/1 draining",
            "rollout student/0 sleeping",
            "rollout student/1 sleeping",
            f"rollout gave up {both}",
            f"genrm has the lease of {both}",
            "genrm judge/0 ready",
            "enter 'genrm' of batch '1': done",
            "enter 'teacher' of batch '1': begun",
            "genrm judge/0 draining",
            "genrm judge/0 sleeping",
            f"genrm gave up {both}",
            "teacher has the lease of node-0:0",
            "teacher big/0 ready",
            "enter 'teacher' of batch '1': done",
            "enter 'train' of batch '1': begun",
            "teacher big/0 draining",
            "teacher big/0 sleeping",
            "teacher gave up node-0:0",
            f"trainer has the lease of {both}",
            "enter 'train' of batch '1': done",
            f"trainer gave up {both}: the trainer holds nothing",
        ]
        await w.end()

    run_virtual(scenario())


def test_i91_running_requests_end_before_a_role_makes_way():
    async def scenario():
        w = World()
        await w.enter("rollout")
        engine = w.engines.engine("student/0")
        request = engine.send(5.0)
        await w.enter("genrm")
        assert request.ended == "finished"
        assert not engine.held
        assert w.engines.engine("judge/0").held == ALL_TAGS
        await w.end()

    run_virtual(scenario())


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.HANG_DONE, Fault.UNANSWERED, Fault.UNSENT])
def test_d9_an_engine_that_cannot_say_what_it_holds_keeps_everybody_out(fault):
    async def scenario():
        w = World(says=False)
        await w.enter("rollout")
        w.engines.faults.next("release", [fault])
        with pytest.raises(RoleOperationFailedError, match="'rollout' perhaps holds memory"):
            await w.enter("genrm")
        assert not any(engine_id == "judge/0" for engine_id, _ in w.engines.engines)
        with pytest.raises(RoleOperationRefusedError, match="blocked"):
            await w.enter("genrm")
        with pytest.raises(RoleOperationFailedError):
            await w.recover()
        await w.managers["rollout"].recover("student/0")
        w.coordinator.look_again()
        assert w.coordinator.document.blocked is None
        await w.enter("genrm")
        await w.end()

    run_virtual(scenario())


def test_d9_an_engine_that_says_what_it_holds_is_found_out_about():
    async def scenario():
        w = World()
        await w.enter("rollout")
        w.engines.faults.next("release", [Fault.UNANSWERED, Fault.UNSENT])
        await w.enter("genrm")
        w.engines.faults.always("release", Fault.UNSENT)
        w.engines.faults.always("resident", Fault.UNSENT)
        with pytest.raises(RoleOperationFailedError):
            await w.enter("teacher")
        w.engines.faults.stop()
        await w.recover()
        await w.enter("teacher")
        await w.end()

    run_virtual(scenario())


def test_i92_an_engine_that_dies_is_not_started_anew_in_anothers_phase():
    async def scenario():
        w = World()
        for phase in ("rollout", "genrm", "teacher"):
            await w.enter(phase)
        w.engines.engine("big/0").crash()
        await asyncio.sleep(0.5)
        await w.enter("genrm")
        await asyncio.sleep(500.0)
        (running,) = [each for each in w.engines.running if each.held]
        assert running.launch.engine_id == "judge/0"
        await w.enter("teacher")
        assert w.engines.engine("big/0").launch.generation == 3, "the second was on its way"
        w.engines.engine("big/0").crash()
        await asyncio.sleep(500.0)
        assert w.engines.engine("big/0").launch.generation == 4, "it has its lease"
        await w.end()

    run_virtual(scenario())


def test_i92_a_wake_without_a_lease_loads_nothing_whoever_asks():
    async def scenario():
        w = World()
        await w.enter("rollout")
        await w.enter("genrm")
        for role in ("rollout", "teacher"):
            with pytest.raises((RoleOperationRefusedError, RoleOperationFailedError)):
                await w.managers[role].activate()
        held = {each.launch.engine_id for each in w.engines.running if each.held}
        assert held == {"judge/0"}
        await w.end()

    run_virtual(scenario())


def test_activate_a_replica_that_does_not_start_is_compensated():
    async def scenario():
        w = World()
        w.engines.faults.next("launch", [None, Fault.REFUSED])
        with pytest.raises(RoleOperationFailedError):
            await w.enter("rollout")
        assert w.coordinator.document.blocked is None
        assert {view.holder for view in w.coordinator.document.leases} == {None}
        assert w.engines.running == ()
        await w.enter("rollout")
        await w.end()

    run_virtual(scenario())
