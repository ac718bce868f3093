"""Which devices replicas and the trainer are told of, for plans of one node and of several."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.errors import ConfigurationError
from phalanx.roles.contracts import ReplicaLaunch
from phalanx.roles.engine_command import EnginePrograms, ListenAddress, engine_command
from phalanx.roles.placement.planner import plan
from phalanx.roles.replica_devices import SimulatedCluster
from phalanx.schema.job_placement import ClusterSpec, NodeSpec, PlacementPlan, PlacementRequest
from phalanx.schema.roles import (
    DeploymentSpec,
    EngineGroupSpec,
    InferenceModelSpec,
    InferenceRoleSpec,
    PlacementMode,
    RoutingSpec,
    WorkloadType,
)

FILE = Path("/run/job.devices")
HERE = ListenAddress("127.0.0.1", 1)


def role(name: str, *groups: EngineGroupSpec) -> InferenceRoleSpec:
    model = InferenceModelSpec("student", "m", groups)
    return InferenceRoleSpec(
        name, WorkloadType(name), DeploymentSpec(), RoutingSpec("student"), (model,)
    )


def planned(
    mode: PlacementMode, nodes: tuple[int, ...], *roles: InferenceRoleSpec, memory: int | None = 100
) -> PlacementPlan:
    specs = tuple(NodeSpec(f"node{at}", num) for at, num in enumerate(nodes))
    return plan(PlacementRequest(mode, ClusterSpec(specs, memory), roles, trainer_devices=2))


def launches(made: PlacementPlan, name: str):
    (spec,) = (each for each in made.roles if each.role == name)
    (model,) = spec.models
    ordinal = 0
    for index, group in enumerate(model.engine_groups):
        for _ in range(group.num_replicas):
            engine_id = f"{model.name}/{ordinal}"
            yield ReplicaLaunch(name, engine_id, 0, model, group, index, ordinal)
            ordinal += 1


def told(made: PlacementPlan, name: str) -> list[str]:
    cluster = SimulatedCluster(made, FILE)
    return [
        cluster.of_replica(launch)["PHALANX_SIMULATED_DEVICES"] for launch in launches(made, name)
    ]


def test_i64_roles_of_different_phases_have_the_same_devices():
    made = planned(
        PlacementMode.DEFER,
        (4,),
        role("rollout", EngineGroupSpec(num_replicas=4)),
        role("teacher", EngineGroupSpec(num_replicas=2, ranks_per_replica=2)),
    )
    assert told(made, "rollout") == [f"{FILE}:{at}@rollout/student/{at}" for at in range(4)]
    assert told(made, "teacher") == [
        f"{FILE}:0,1@teacher/student/0",
        f"{FILE}:2,3@teacher/student/1",
    ]
    trainer = SimulatedCluster(made, FILE).of_trainer()
    assert trainer["PHALANX_SIMULATED_DEVICES"] == f"{FILE}:0,1@trainer"


def test_i63_roles_of_a_split_group_and_the_trainer_have_devices_of_their_own():
    made = planned(
        PlacementMode.SPLIT,
        (6,),
        role("rollout", EngineGroupSpec(num_replicas=2)),
        role("teacher", EngineGroupSpec(ranks_per_replica=2)),
    )
    trainer = SimulatedCluster(made, FILE).of_trainer()["PHALANX_SIMULATED_DEVICES"]
    every = [*told(made, "rollout"), *told(made, "teacher"), trainer]
    numbers = [n for each in every for n in each.split(":")[1].split("@")[0].split(",")]
    assert sorted(map(int, numbers)) == list(range(6))


def test_i62_several_nodes_are_counted_through():
    made = planned(
        PlacementMode.DECOUPLED,
        (4, 4, 2),
        role("rollout", EngineGroupSpec(ranks_per_replica=8, nodes_per_replica=2)),
        memory=100,
    )
    assert told(made, "rollout") == [f"{FILE}:0,1,2,3,4,5,6,7@rollout/student/0"]
    # A replica over several of these nodes is the processes of one machine.
    (launch,) = launches(made, "rollout")
    command = engine_command(launch, HERE, EnginePrograms(), SimulatedCluster(made, FILE))
    assert command.environment["PHALANX_SIMULATED_DEVICES"].endswith("@rollout/student/0")
    assert command.environment["PHALANX_DEVICE"] == "cpu"
    assert "CUDA_VISIBLE_DEVICES" not in command.environment
    with pytest.raises(ConfigurationError, match="nodes_per_replica=2"):
        engine_command(launch, HERE, EnginePrograms())


def test_a_plan_on_real_devices_has_no_ledger():
    made = planned(
        PlacementMode.DEFER, (4,), role("rollout", EngineGroupSpec(num_replicas=2)), memory=None
    )
    assert SimulatedCluster.of(made, FILE) is None
    assert SimulatedCluster.of(None, FILE) is None
    (launch, second) = launches(made, "rollout")
    environment = engine_command(second, HERE, EnginePrograms()).environment
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert "PHALANX_SIMULATED_DEVICES" not in environment


def test_one_replica_more_than_has_devices_is_refused():
    made = planned(PlacementMode.DEFER, (2,), role("rollout", EngineGroupSpec(num_replicas=2)))
    *_, last = launches(made, "rollout")
    beyond = ReplicaLaunch("rollout", "student/2", 0, last.model, last.group, 0, 2)
    with pytest.raises(ConfigurationError, match="student/2 needs 1 devices.*2 for 2 replicas"):
        SimulatedCluster(made, FILE).of_replica(beyond)


def test_the_ledger_has_every_device_of_the_cluster(tmp_path):
    made = planned(PlacementMode.DEFER, (2, 3), role("rollout", EngineGroupSpec(num_replicas=2)))
    ledger = SimulatedCluster(made, tmp_path / "devices").make()
    assert (ledger.num_devices, ledger.budget_bytes) == (5, 100)
