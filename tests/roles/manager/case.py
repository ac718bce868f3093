"""A manager on fakes, every snapshot of which is checked when it is published."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from phalanx.clock import Clock
from phalanx.roles.events import EventLog
from phalanx.roles.manager import InferenceManager
from phalanx.roles.publication import initial_content
from phalanx.routing.roles.registry import RoleRegistry
from phalanx.routing.roles.snapshot import ReplicaState, RoleReplica, RoleSnapshot
from phalanx.schema.roles import (
    DeploymentSpec,
    EngineGroupSpec,
    EngineKind,
    InferenceModelSpec,
    InferenceRoleSpec,
    RouteMode,
    RoutingSpec,
    WeightSource,
    WorkerType,
    WorkloadType,
)
from phalanx.testing.clock import ManualClock
from phalanx.testing.role_fakes import FakeEngine, FakeRoleWorld
from phalanx.testing.virtual_time import run_virtual

__all__ = [
    "Case",
    "EngineGroupSpec",
    "EngineKind",
    "WeightSource",
    "WorkerType",
    "case",
    "model",
    "run",
]


def model(name: str = "m", replicas: int = 1, **fields) -> InferenceModelSpec:
    groups = fields.pop("engine_groups", (EngineGroupSpec(num_replicas=replicas),))
    if "weight_source" in fields:
        fields["weight_source"] = WeightSource(fields["weight_source"])
    if fields.pop("router", False):
        fields["route_mode"] = RouteMode.SGLANG_ROUTER
    return InferenceModelSpec(name=name, model_path="/models/m", engine_groups=groups, **fields)


class Case:
    def __init__(self, *models: InferenceModelSpec, world: FakeRoleWorld, **deployment) -> None:
        workload = deployment.pop("workload", WorkloadType.ROLLOUT)
        times = {"startup_timeout_s": 60.0, "drain_timeout_s": 30.0, "offload_timeout_s": 20.0}
        self.spec = InferenceRoleSpec(
            role="rollout",
            workload=workload,
            deployment=DeploymentSpec(**{**times, **deployment}),
            routing=RoutingSpec(),
            models=models or (model(),),
        )
        self.world = world
        self.clock: Clock = ManualClock()
        self.registry = RoleRegistry("rollout", "e", initial_content(self.spec))
        self.events = EventLog(self.clock)
        self.manager = InferenceManager(
            self.spec, world.backends, self.registry, self.clock, self.events
        )
        self.snapshots: list[RoleSnapshot] = [self.registry.snapshot]
        self.registry.listen(self.snapshots.append)
        self.violations: list[str] = []
        self.registry.listen(self._check)

    @property
    def revision(self) -> int:
        return self.registry.snapshot.revision

    def shown(self, engine_id: str = "m/0") -> RoleReplica | None:
        for each in self.registry.snapshot.content.models:
            for replica in each.replicas:
                if replica.engine_id == engine_id:
                    return replica
        return None

    def state(self, engine_id: str = "m/0") -> ReplicaState | None:
        shown = self.shown(engine_id)
        return None if shown is None else shown.state

    def model_state(self, name: str = "m") -> ReplicaState:
        return self.registry.snapshot.content.by_name[name].state

    def engine(self, engine_id: str = "m/0", generation: int | None = None) -> FakeEngine:
        return self.world.engine(engine_id, generation)

    def states_seen(self, engine_id: str = "m/0") -> list[str]:
        """The states that snapshots have shown of it, one after the other."""
        seen: list[str] = []
        for snapshot in self.snapshots:
            for each in snapshot.content.models:
                for replica in each.replicas:
                    if replica.engine_id == engine_id and seen[-1:] != [replica.state.value]:
                        seen.append(replica.state.value)
        return seen

    async def until(self, condition: Callable[[], bool]) -> None:
        # Of virtual time, in which a manager that goes round in circles would never be stuck.
        async with asyncio.timeout(100_000.0):
            while not condition():
                await self.registry.wait(self.revision, None)

    def _check(self, snapshot: RoleSnapshot) -> None:
        try:
            self._check_eligible(snapshot)
        except AssertionError as error:
            # Whoever publishes may be in a course of steps that survives this.
            self.violations.append(str(error))
            raise

    def _check_eligible(self, snapshot: RoleSnapshot) -> None:
        for each in snapshot.content.models:
            router = self.world.routers.get(each.name)
            if each.state is ReplicaState.READY:
                assert any(replica.state is ReplicaState.READY for replica in each.replicas)
            for replica in each.replicas:
                if replica.state is not ReplicaState.READY:
                    continue
                assert replica.base_url is not None and not replica.blocked
                engine = self.world.by_url(replica.base_url)
                # A death is known when its exit has been heard of, a few turns of the loop later.
                assert engine.serves or not engine.is_up, (replica, engine)
                if each.weight_source is not WeightSource.STATIC:
                    assert replica.weight_version is not None
                    # An update may be under way, the manager's own or a trainer's.
                    newer = (*engine.loads[-1:], *engine.pushed[-1:])
                    assert engine.version in (replica.weight_version, *newer)
                if each.route_mode is RouteMode.SGLANG_ROUTER and engine.is_up:
                    assert router is not None and replica.base_url in router.workers


def case(*models: InferenceModelSpec, world: FakeRoleWorld | None = None, **deployment) -> Case:
    return Case(*models, world=world or FakeRoleWorld(keeps_weights=True), **deployment)


def run(scenario: Callable[[], Coroutine[object, object, None]]) -> None:
    run_virtual(scenario())
