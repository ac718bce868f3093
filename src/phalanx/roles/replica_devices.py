"""Which devices a replica, or the trainer, has, as its processes are told in their environment."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from phalanx.device_ledger import DeviceLedger
from phalanx.errors import ConfigurationError
from phalanx.roles.contracts import ReplicaLaunch
from phalanx.schema.job_placement import TRAINER, Bundle, PlacementPlan
from phalanx.settings import SimulatedDevices


@dataclass(frozen=True)
class SimulatedCluster:
    """A plan on simulated devices, whose ledger is `file`: device N of it is the N-th of the
    cluster, node after node, so that one machine stands for all of them.
    """

    plan: PlacementPlan
    file: Path

    @classmethod
    def of(cls, plan: PlacementPlan | None, file: Path) -> SimulatedCluster | None:
        """None for a plan on real devices, or without any."""
        if plan is None or plan.cluster.device_memory_bytes is None or not plan.groups:
            return None
        return cls(plan, file)

    def make(self) -> DeviceLedger:
        """The ledger, in its file. Raises as `DeviceLedger.create`."""
        budget = self.plan.cluster.device_memory_bytes
        assert budget is not None
        return DeviceLedger.create(self.file, self.plan.cluster.num_devices, budget)

    def of_replica(self, launch: ReplicaLaunch) -> dict[str, str]:
        """What the processes of a replica are told, rank by rank. Raises `ConfigurationError` where
        its group has no devices for it.
        """
        placement = launch.group.placement
        if placement is None:
            return {}
        bundles = self.plan.group(self.plan.group_name(launch.role)).bundles
        mine = _slice(launch, placement.bundle_indices)
        return self._told((bundles[index] for index in mine), f"{launch.role}/{launch.engine_id}")

    def of_trainer(self) -> dict[str, str]:
        """What the trainer's program is told; nothing where it has no devices."""
        bundles = self.plan.bundles_of_trainer()
        return self._told(bundles, TRAINER) if bundles else {}

    def number(self, bundle: Bundle) -> int:
        """Of a device, in the ledger."""
        return self._first[bundle.node] + bundle.device

    @cached_property
    def _first(self) -> dict[str, int]:
        return self.plan.cluster.first_numbers()

    def _told(self, bundles: Iterable[Bundle], owner: str) -> dict[str, str]:
        devices = SimulatedDevices(self.file, tuple(map(self.number, bundles)), owner)
        # A machine may have real ones too.
        return {"PHALANX_DEVICE": "cpu", **devices.variable()}


def real_devices(launch: ReplicaLaunch) -> dict[str, str]:
    """The GPUs of its node that the placement of its group gives to a replica, and no others."""
    placement = launch.group.placement
    if placement is None or not placement.gpu_ids:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, _slice(launch, placement.gpu_ids)))}


def real_trainer_devices(plan: PlacementPlan) -> dict[str, str]:
    """The GPUs that a plan gives the trainer, where they are all of one node."""
    mine = plan.bundles_of_trainer()
    if len({bundle.node for bundle in mine}) != 1 or plan.cluster.device_memory_bytes is not None:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(bundle.device) for bundle in mine)}


def slot(launch: ReplicaLaunch) -> int:
    """Which replica of its group it is, where `ordinal` counts those of all of the model's groups."""
    earlier = launch.model.engine_groups[: launch.group_index]
    return launch.ordinal - sum(group.num_replicas for group in earlier)


def _slice(launch: ReplicaLaunch, of_group: tuple[int, ...]) -> tuple[int, ...]:
    ranks = launch.group.ranks_per_replica
    first = slot(launch) * ranks
    mine = of_group[first : first + ranks]
    if len(mine) < ranks:
        raise ConfigurationError(
            f"{launch.engine_id} needs {ranks} devices, and the placement of its group has"
            f" {len(of_group)} for {len(of_group) // ranks} replicas; place fewer replicas, or give"
            " more devices"
        )
    return mine
