"""A whole job without processes: its real coordinator, managers and HTTP routes over fake engines,
where any process may end at any call and is started again as `phalanx up` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from phalanx.errors import PhalanxError
from phalanx.roles.contracts import Backends
from phalanx.roles.control_app import ControlApi
from phalanx.roles.control_messages import Job, JobStage
from phalanx.roles.coordination.coordinator import LifecycleCoordinator
from phalanx.roles.coordination.journal import Journal
from phalanx.roles.coordination.leased import leased
from phalanx.roles.coordination.schedule import Schedule
from phalanx.roles.coordination.tenants import RoleTenant, Tenant
from phalanx.roles.coordination.trainer import Processes
from phalanx.roles.events import EventLog
from phalanx.roles.manager import InferenceManager
from phalanx.roles.publication import initial_content
from phalanx.roles.together import all_or_first_error
from phalanx.routing.roles.registry import RoleRegistry
from phalanx.routing.roles.snapshot import ReplicaState, RoleSnapshot
from phalanx.schema.job_placement import TRAINER, PhaseSpec
from phalanx.schema.roles import (
    DeploymentSpec,
    EngineGroupSpec,
    InferenceModelSpec,
    InferenceRoleSpec,
    PlacementMode,
    RoutingSpec,
    WeightSource,
    WorkloadType,
)
from phalanx.testing.clock import ManualClock
from phalanx.testing.job_world_devices import FakeDevices
from phalanx.testing.job_world_disk import FakeDisk, FakeMachine
from phalanx.testing.job_world_faults import EngineFaults, Life, ProcessEndedError, Script
from phalanx.testing.job_world_operations import ToldOperations
from phalanx.testing.role_fakes import FakeEngine, FakeRoleWorld

_DYING_S = 1.5


@dataclass(frozen=True)
class RoleShape:
    """A role with one model of its name, whose replicas have these bundles each. `stays`: it takes no
    turns, and starts with its job.
    """

    name: str
    replicas: tuple[tuple[str, ...], ...]
    weights: WeightSource = WeightSource.STATIC
    stays: bool = False


@dataclass(frozen=True)
class JobLayout:
    """`says`: whether engines tell what they hold. `lasting`: whether they are started again."""

    roles: tuple[RoleShape, ...]
    trainer: tuple[str, ...]
    phases: tuple[PhaseSpec, ...]
    says: bool = True
    lasting: bool = True

    @property
    def bundles(self) -> dict[tuple[str, str], tuple[str, ...]]:
        """Of every engine, and of the trainer."""
        found = {
            (role.name, f"{role.name}/{at}"): its
            for role in self.roles
            for at, its in enumerate(role.replicas)
        }
        return {**found, (TRAINER, TRAINER): self.trainer}

    @property
    def schedule(self) -> Schedule:
        bundles = {
            role.name: tuple(sorted({one for its in role.replicas for one in its}))
            for role in self.roles
            if not role.stays
        }
        return Schedule(PlacementMode.DEFER, self.phases, {**bundles, TRAINER: self.trainer})

    @property
    def staying(self) -> frozenset[str]:
        """The roles that take no turns."""
        return frozenset(role.name for role in self.roles if role.stays)

    def spec(self, role: RoleShape) -> InferenceRoleSpec:
        model = InferenceModelSpec(
            name=role.name,
            model_path="/m",
            engine_groups=(EngineGroupSpec(num_replicas=len(role.replicas)),),
            weight_source=role.weights,
            elastic_enabled=True,
            fault_tolerance_enabled=self.lasting,
        )
        deployment = DeploymentSpec(
            placement=PlacementMode.DEFER,
            startup_timeout_s=60.0,
            drain_timeout_s=5.0,
            offload_timeout_s=20.0,
            start_asleep=not role.stays,
        )
        return InferenceRoleSpec(
            role=role.name,
            workload=WorkloadType.ROLLOUT,
            deployment=deployment,
            routing=RoutingSpec(),
            models=(model,),
        )


@dataclass(frozen=True)
class WorldParts:
    """What a test may put something broken in the place of. `waits_for_dead`: whether a control
    process begins only when nothing is left of the engines of the one before.
    """

    tenant: Callable[[InferenceManager], Tenant] = RoleTenant
    journal: Callable[[Journal], Journal] = lambda journal: journal
    processes: Callable[[Processes], Processes] = lambda processes: processes
    backends: Callable[[Backends, str, Callable[[str], None]], Backends] = leased
    waits_for_dead: bool = True


class FakeControl:
    """One control process, from its start to its end: everything in it is real but its engines."""

    def __init__(self, world: JobWorld, life: Life) -> None:
        """Raises what a start of the coordinator does."""
        layout, parts = world.layout, world.parts
        clock = ManualClock()
        self.life = life
        self.starting: asyncio.Task[None] | None = None
        self._staying = layout.staying
        self._end = world.end_control
        self.events = EventLog(clock)
        self.engines: dict[str, FakeRoleWorld] = {}
        self.managers: dict[str, InferenceManager] = {}
        for role in layout.roles:
            self.engines[role.name] = FakeRoleWorld(
                says=layout.says,
                keeps_weights=role.weights is WeightSource.STATIC,
                faults=EngineFaults(
                    world.script,
                    life,
                    world.end_control,
                    world.end_driver,
                    # No engine of another make could know of it, and nothing repeats a connection.
                    repeats=layout.says,
                ),
                took=world.devices.took,
            )
            spec = layout.spec(role)
            registry = RoleRegistry(role.name, "e", initial_content(spec))
            backends = parts.backends(
                self.engines[role.name].backends, role.name, self._check_lease
            )
            self.managers[role.name] = InferenceManager(
                spec, backends, registry, clock, self.events
            )
            registry.listen(world.published)
        self.coordinator = LifecycleCoordinator(
            layout.schedule,
            {name: parts.tenant(manager) for name, manager in self.managers.items()},
            parts.journal(world.disk.journal(world.script, life, world.end_control)),
            parts.processes(world.machine.seen_by(life)),
            clock,
            self.events,
        )
        api = ControlApi(
            self.managers,
            self.coordinator,
            self.events,
            epoch="e",
            describe=self._describe,
            stop=lambda now: None,
        )
        self.transport = httpx.ASGITransport(app=api.app())

    async def start(self) -> None:
        """The roles that stay. Where one does not start the job ends, as it does under `phalanx up`."""
        try:
            await all_or_first_error(self.managers[role].start() for role in self._staying)
        except (PhalanxError, ProcessEndedError):
            if self.life.is_alive:
                self._end()

    def has_lease(self, tenant: str) -> bool:
        return tenant in self._staying or any(
            view.holder == tenant for view in self.coordinator.document.leases
        )

    def _check_lease(self, role: str) -> None:
        self.coordinator.check_lease(role)

    async def _describe(self) -> Job:
        return Job(
            name="job",
            epoch="e",
            stage=JobStage.RUNNING,
            pid=1,
            started_wall_s=0.0,
            control_url="",
            gateway_url="",
            gateway_up=True,
            log_directory="",
            last_event=0,
            roles=(),
            phases=self.coordinator.document,
        )


class JobWorld:
    """Made in a running event loop. `end_driver` ends the trainer's process, which a test gives a
    meaning. `violations` has everything that must never be.
    """

    def __init__(self, layout: JobLayout, script: Script, parts: WorldParts | None = None) -> None:
        self.layout = layout
        self.script = script
        self.parts = parts or WorldParts()
        self.control: FakeControl | None = None
        self.disk = FakeDisk()
        self.machine = FakeMachine()
        self.devices = FakeDevices(layout.bundles, self._has_lease)
        self.end_driver: Callable[[], None] = lambda: None
        self._wrong: list[str] = []
        self._phases: dict[str, str | None] = {}
        self._dying: list[FakeEngine] = []
        self.operations = ToldOperations(self.note, lambda: self.disk.refusals > 0)
        script.looks.append(self.devices.check)

    @property
    def violations(self) -> list[str]:
        return [*self.devices.violations, *self._wrong]

    def note(self, words: str) -> None:
        """Something that must never be."""
        if words not in self._wrong:
            self._wrong.append(words)

    async def start_control(self) -> None:
        """Once nothing is left of the one before. It may end in the middle of it."""
        assert self.control is None
        if self.parts.waits_for_dead and self._dying:
            await asyncio.sleep(_DYING_S * (len(self._dying) + 1))
        self._dying.clear()
        self._phases.clear()
        life = Life()
        control = FakeControl(self, life)
        if life.is_alive:
            self.control = control
            control.starting = asyncio.create_task(control.start())
            self.devices.check()

    def end_control(self) -> None:
        """As `kill -9` does; its engines are gone a moment later, one after the other."""
        control, self.control = self.control, None
        if control is None:
            return
        control.life.end()
        loop = asyncio.get_running_loop()
        for role in control.engines.values():
            for engine in role.running:
                self._dying.append(engine)
                loop.call_later(_DYING_S * len(self._dying), engine.end)

    def published(self, snapshot: RoleSnapshot) -> None:
        """A phase is shown when its roles serve; an engine that has died may not be known of."""
        content, role = snapshot.content, snapshot.role
        before, self._phases[role] = self._phases.get(role), content.phase
        phase = next((each for each in self.layout.phases if each.name == content.phase), None)
        if phase is None or content.phase == before or role not in phase.roles:
            return
        for model in content.models:
            dead = any(replica.state is ReplicaState.DEAD for replica in model.replicas)
            if model.state is not ReplicaState.READY and not dead:
                self.note(f"phase {phase.name} is shown, and {role} is {model.state}")

    def _has_lease(self, tenant: str) -> bool | None:
        return None if self.control is None else self.control.has_lease(tenant)
