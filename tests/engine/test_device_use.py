"""The drivers' measure of each replica's devices in an engine's statistics."""

from __future__ import annotations

from phalanx.engine.device_use import DeviceUse, create_device_use
from phalanx.engine_config import DeviceConfig, EngineConfig
from phalanx.schema.deployment import DeploymentConfig
from phalanx.schema.launch import Mode
from phalanx.schema.statistics import EngineStatistics, ReplicaStatistics

STATISTICS = EngineStatistics(
    num_completed=3, replicas=(ReplicaStatistics(replica=0), ReplicaStatistics(replica=1))
)


def test_r114_a_replicas_utilization_is_the_mean_of_its_devices():
    busy = {"cuda:3": 0.2, "cuda:1": 0.4, "cuda:0": 1.0, "cuda:2": None}
    use = DeviceUse((("cuda:3", "cuda:1"), ("cuda:0", "cuda:2")), busy.__getitem__)
    measured = use.measured(STATISTICS)
    first, second = measured.replicas
    assert abs(first.device_utilization - 0.3) < 1e-9
    assert second.device_utilization == 1.0
    assert measured.num_completed == 3


def test_devices_that_nobody_measures_have_none():
    measured = DeviceUse((("cuda:0",), ("cuda:1",)), lambda target: None).measured(STATISTICS)
    assert [one.device_utilization for one in measured.replicas] == [None, None]


def test_a_cpu_is_not_measured():
    config = EngineConfig(device=DeviceConfig("cpu", "float32"))
    deployment = DeploymentConfig.local(replica_count=2)
    use = create_device_use(Mode.LOCAL, config, deployment)
    assert use.measured(STATISTICS) is STATISTICS
