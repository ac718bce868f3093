"""A job's part of a Ray cluster: its connection, its placement groups and its launcher, from one open
to one close.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Self

from phalanx.roles.engine_command import EnginePrograms
from phalanx.roles.job_sections import LauncherSection
from phalanx.roles.ray_cluster.binder import DEADLINE_S, BoundPlacement, RayBinder
from phalanx.roles.ray_cluster.cluster import NAMESPACE, RayCluster
from phalanx.roles.ray_cluster.device_memory import ClusterDevices
from phalanx.roles.ray_cluster.groups import RayPlacementGroup
from phalanx.roles.ray_cluster.host import HostSettings, told_devices
from phalanx.roles.ray_cluster.launcher import RayLauncher
from phalanx.roles.ray_cluster.ledgers import MachineLedgers
from phalanx.roles.ray_cluster.observed import parts_of
from phalanx.schema.job_placement import ACTOR_GROUP, TRAINER, PlacementPlan
from phalanx.schema.roles import Ownership


class RayJob:
    """Opened and closed in one event loop. Whatever ends its process, Ray ends all of it. `devices` are
    those of the plan; None where nothing is planned.
    """

    def __init__(
        self,
        cluster: RayCluster,
        bound: BoundPlacement | None,
        launcher: RayLauncher,
        ledgers: MachineLedgers,
    ) -> None:
        self.launcher = launcher
        self._ledgers = ledgers
        self._cluster = cluster
        self._bound = bound
        self.devices = None if bound is None else ClusterDevices(cluster, bound, ledgers)

    @classmethod
    async def open(
        cls,
        name: str,
        given: LauncherSection,
        plan: PlacementPlan | None,
        programs: EnginePrograms,
        logs: Path,
    ) -> Self:
        """Connect, and as `on`. Raises `ConfigurationError` where there is no cluster."""
        simulated = plan is not None and plan.cluster.device_memory_bytes is not None
        num_devices = plan.cluster.num_devices if plan is not None and simulated else None
        cluster = RayCluster(given.address, given.namespace or NAMESPACE, num_devices)
        try:
            return await cls.on(cluster, name, given, plan, programs, logs)
        except BaseException:
            cluster.close()
            raise

    @classmethod
    async def on(
        cls,
        cluster: RayCluster,
        name: str,
        given: LauncherSection,
        plan: PlacementPlan | None,
        programs: EnginePrograms,
        logs: Path,
    ) -> Self:
        """Make and check every placement group of `plan`, and the ledgers of its machines. `logs` and
        `programs` are the same on every machine.

        Raises as `RayBinder.bind` and `MachineLedgers.have`; then nothing is left behind.
        """
        logs = _everywhere(logs)
        budget = None if plan is None else plan.cluster.device_memory_bytes
        ledgers = MachineLedgers(cluster, logs, budget)
        bound = None
        try:
            if plan is not None and plan.groups:
                binder = RayBinder(cluster, name, given.deadline_s or DEADLINE_S)
                bound = await binder.bind(plan)
                await ledgers.have(bound.node_ids)
        except BaseException:
            if bound is not None:
                await asyncio.shield(bound.delete())
            raise
        settings = HostSettings(str(logs), programs, given.first_port)
        launcher = RayLauncher(cluster, bound, settings, name, ledgers)
        return cls(cluster, bound, launcher, ledgers)

    def groups_of(self, role: str) -> tuple[RayPlacementGroup, ...]:
        """Those that the manager of a role deletes."""
        return () if self._bound is None else self._bound.owned_by(Ownership.MANAGER, role)

    @property
    def shared_groups(self) -> tuple[RayPlacementGroup, ...]:
        """Those that the control process deletes, when every manager has ended."""
        return () if self._bound is None else self._bound.owned_by(Ownership.CONTROLLER)

    def trainer_environment(self) -> dict[str, str]:
        """What tells the trainer's program its devices on its machine; nothing where it has none, or
        several machines, or its machine was lost and none has come in its place.
        """
        if self._bound is None or self.devices is None or not self._bound.plan.trainer_bundles:
            return {}
        places = self._bound.groups[ACTOR_GROUP].places
        mine = [places[index] for index in self._bound.plan.trainer_bundles]
        if self.devices.has_lost(mine):
            return {}
        parts = parts_of(mine)
        if len(parts) > 1:
            return {}
        (part,) = parts
        return told_devices(part.devices, self._ledgers.of(part.node_id), TRAINER)

    def close(self) -> None:
        """Disconnect; a cluster that was started for the job ends."""
        self._cluster.close()


def _everywhere(logs: Path) -> Path:
    """The same path for an actor, whose working directory is another one."""
    return logs.absolute()
