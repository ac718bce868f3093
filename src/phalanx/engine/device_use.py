"""How busy the devices of each replica are, as their driver measures it."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

import msgspec

from phalanx.engine.deployment_plan import DeploymentPlan, visible_devices
from phalanx.engine_config import EngineConfig
from phalanx.schema.deployment import DeploymentConfig
from phalanx.schema.launch import Mode
from phalanx.schema.statistics import EngineStatistics, ReplicaStatistics

Measure = Callable[[str], float | None]


class DeviceUse:
    """Adds `device_utilization` to an engine's statistics; a CPU has no such measure."""

    def __init__(self, devices: tuple[tuple[str, ...], ...], measure: Measure) -> None:
        """`devices` are the targets of each replica's ranks, in this process's numbering; empty
        where there is nothing to measure.
        """
        self._devices = devices
        self._measure = measure

    def measured(self, statistics: EngineStatistics) -> EngineStatistics:
        """`statistics` with the newest measures, the mean over a replica's devices."""
        if not self._devices:
            return statistics
        replicas = tuple(map(self._of_replica, statistics.replicas))
        return msgspec.structs.replace(statistics, replicas=replicas)

    def _of_replica(self, one: ReplicaStatistics) -> ReplicaStatistics:
        measures = [self._measure(device) for device in self._devices[one.replica]]
        known = [measure for measure in measures if measure is not None]
        return msgspec.structs.replace(one, device_utilization=fmean(known) if known else None)


def create_device_use(mode: Mode, config: EngineConfig, deployment: DeploymentConfig) -> DeviceUse:
    """The use of the devices that a deployment takes."""
    target = config.device.target
    num_visible = visible_devices(target)
    if num_visible is None or target == "cpu":
        return DeviceUse((), _utilization)
    if mode is not Mode.LOCAL:
        return DeviceUse(((target,),), _utilization)
    plan = DeploymentPlan.for_machine(deployment, config.parallel, num_visible)
    return DeviceUse(
        tuple(
            tuple(f"cuda:{worker.device_index}" for worker in plan.replica(replica_id))
            for replica_id in range(plan.replica_count)
        ),
        _utilization,
    )


def _utilization(target: str) -> float | None:
    from phalanx.device.utilization import utilization

    return utilization(target)
