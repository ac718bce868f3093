"""Where each rank of each replica goes, by example and over random deployments."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.engine.deployment_plan import DeploymentPlan
from phalanx.errors import ConfigurationError
from phalanx.parallel.layout import GROUP_NAMES, build_layout
from phalanx.schema.deployment import DeploymentConfig, NodeResources
from phalanx.schema.parallel import (
    AttentionParallelConfig,
    DenseParallelConfig,
    MoeParallelConfig,
    OuterParallelConfig,
    ParallelConfig,
)


def tensor_parallel(size: int) -> ParallelConfig:
    return ParallelConfig(
        dense=DenseParallelConfig(tp_size=size), attention=AttentionParallelConfig(tp_size=size)
    )


def build(parallel: ParallelConfig, replica_count: int, *devices: tuple[int, ...], **more):
    nodes = [NodeResources(rank, slots, f"10.0.0.{rank}") for rank, slots in enumerate(devices)]
    return DeploymentPlan.build(parallel, replica_count, nodes, **more)


def test_r31_devices_fill_replicas_in_order():
    plan = build(tensor_parallel(2), 2, (0, 1, 2, 3))
    assert [(w.replica_id, w.replica_rank, w.device_index) for w in plan.workers] == [
        (0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3),
    ]  # fmt: skip
    assert [worker.is_output_rank for worker in plan.workers] == [True, False, True, False]
    assert [worker.device_index for worker in plan.replica(1)] == [2, 3]
    assert plan.output_worker(1).worker_id == 2


def test_r31_in_the_order_in_which_they_are_given():
    plan = build(tensor_parallel(2), 2, (3, 1, 0, 2))
    assert [w.device_index for w in plan.replica(0)] == [3, 1]
    assert [w.device_index for w in plan.replica(1)] == [0, 2]


def test_r23_r24_r89_workers_are_replicas_times_ranks():
    four_devices = (0, 1, 2, 3)
    for replicas, size in ((4, 1), (2, 2), (1, 4)):
        plan = build(tensor_parallel(size), replicas, four_devices)
        assert plan.replica_world_size == tensor_parallel(size).infer_replica_world_size() == size
        assert len(plan.workers) == replicas * size == 4
        assert {worker.device_index for worker in plan.workers} == set(four_devices)


def test_r12_r24_the_guides_topology_takes_eight_ranks_a_replica():
    parallel = ParallelConfig(
        outer=OuterParallelConfig(cfg_size=2),
        dense=DenseParallelConfig(tp_size=4),
        attention=AttentionParallelConfig(tp_size=4),
        moe=MoeParallelConfig(tp_size=2, ep_size=2),
    )
    plan = build(parallel, 2, tuple(range(16)), output_rank=6)
    assert (len(plan.workers), plan.replica_world_size) == (16, 8)
    rank_6 = plan.output_worker(1)
    assert (rank_6.worker_id, rank_6.replica_rank) == (14, 6)
    ranks = {name: rank_6.group_ranks[name] for name in ("world", "cfg", "dense_tp", "moe_ep")}
    assert ranks == {"world": 6, "cfg": 1, "dense_tp": 2, "moe_ep": 1}


def test_r22_group_ranks_are_those_inside_a_replica():
    plan = build(tensor_parallel(2), 3, tuple(range(6)))
    for replica_id in range(3):
        worlds = [worker.group_ranks["world"] for worker in plan.replica(replica_id)]
        assert worlds == [0, 1]
        assert all(set(w.group_ranks) == set(GROUP_NAMES) for w in plan.replica(replica_id))


def test_devices_beyond_the_last_rank_stay_free():
    plan = build(tensor_parallel(2), 1, (5, 4, 3, 2))
    assert [worker.device_index for worker in plan.workers] == [5, 4]


def test_too_few_devices_are_refused():
    with pytest.raises(ConfigurationError, match="needs 4 worker slots .* there are 3 devices"):
        build(tensor_parallel(2), 2, (0, 1, 2))


@pytest.mark.parametrize("output_rank", [-1, 2])
def test_an_output_rank_outside_the_replica_is_refused(output_rank):
    with pytest.raises(ConfigurationError, match=f"output_rank={output_rank} must be a rank"):
        build(tensor_parallel(2), 1, (0, 1), output_rank=output_rank)


@pytest.mark.parametrize("ranks", [(1,), (0, 2), (1, 0), (0, 0)])
def test_nodes_must_count_up_from_zero(ranks):
    nodes = [NodeResources(rank, (0,)) for rank in ranks]
    with pytest.raises(ConfigurationError, match="must count up from 0"):
        DeploymentPlan.build(ParallelConfig(), 1, nodes)


def test_a_replica_over_two_nodes_meets_on_its_first():
    plan = build(tensor_parallel(3), 2, (0, 1), (0, 1), (0, 1))
    assert [worker.node_rank for worker in plan.workers] == [0, 0, 1, 1, 2, 2]
    assert plan.master_addrs == ("10.0.0.0", "10.0.0.1")
    assert build(tensor_parallel(2), 2, (0, 1), (0, 1)).master_addrs == (None, None)
    nodes = [
        NodeResources(0, (0, 1), "10.0.0.0"),
        NodeResources(1, (0, 1)),
        NodeResources(2, (0, 1)),
    ]
    with pytest.raises(ConfigurationError, match="replica 1 spans nodes and begins on node 1"):
        DeploymentPlan.build(tensor_parallel(3), 2, nodes)


@pytest.mark.parametrize(
    ("config", "visible", "devices"),
    [
        (DeploymentConfig.local(replica_count=3), None, [0, 1, 2]),
        (DeploymentConfig.local(replica_count=2), 4, [0, 1]),
        (DeploymentConfig.local((7, 9), replica_count=2), None, [7, 9]),
        (DeploymentConfig.local((3, 0), replica_count=2), 4, [3, 0]),
    ],
)
def test_a_machines_devices_are_all_visible_ones_or_as_many_ordinals_as_needed(
    config, visible, devices
):
    plan = DeploymentPlan.for_machine(config, ParallelConfig(), visible)
    assert [worker.device_index for worker in plan.workers] == devices


def test_r32_a_device_that_is_not_visible_is_refused():
    config = DeploymentConfig.local((0, 4), replica_count=2)
    with pytest.raises(ConfigurationError, match=r"device 4 of devices=\(0, 4\) does not exist"):
        DeploymentPlan.for_machine(config, ParallelConfig(), 4)


def test_a_machine_with_too_few_visible_devices_is_refused():
    with pytest.raises(ConfigurationError, match="needs 2 worker slots"):
        DeploymentPlan.for_machine(DeploymentConfig(), tensor_parallel(2), 1)


def test_r18_two_workers_never_share_a_device():
    config = DeploymentConfig.local((0, 1), replica_count=2)
    with pytest.raises(ConfigurationError, match="needs 4 worker slots"):
        DeploymentPlan.for_machine(config, tensor_parallel(2), None)


def test_s15_a_placement_is_immutable_and_travels():
    worker = build(tensor_parallel(2), 1, (0, 1)).workers[1]
    copy = pickle.loads(pickle.dumps(worker))
    assert copy == worker
    assert hash(copy) == hash(worker)
    with pytest.raises(TypeError):
        worker.group_ranks["world"] = 0
    with pytest.raises(FrozenInstanceError):
        worker.device_index = 1


@st.composite
def deployments(draw):
    parallel = ParallelConfig(
        outer=OuterParallelConfig(draw(st.integers(1, 2)), draw(st.integers(1, 2))),
        dense=DenseParallelConfig(tp_size=draw(st.sampled_from([None, 2, 4]))),
    )
    replica_count = draw(st.integers(1, 4))
    needed = replica_count * parallel.infer_replica_world_size()
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    while sum(sizes) < needed:
        sizes.append(draw(st.integers(1, 9)))
    nodes = tuple(
        NodeResources(rank, draw(st.permutations(range(size))), f"node-{rank}")
        for rank, size in enumerate(sizes)
    )
    output_rank = draw(st.integers(0, parallel.infer_replica_world_size() - 1))
    return parallel, replica_count, nodes, output_rank


@given(deployments())
def test_r31_any_deployment_places_each_rank_once_in_order(deployment):
    parallel, replica_count, nodes, output_rank = deployment
    plan = DeploymentPlan.build(parallel, replica_count, nodes, output_rank=output_rank)
    world = parallel.infer_replica_world_size()
    slots = [(node.rank, device) for node in nodes for device in node.devices]
    assert [(w.node_rank, w.device_index) for w in plan.workers] == slots[: replica_count * world]
    assert [w.worker_id for w in plan.workers] == list(range(replica_count * world))
    layout = build_layout(parallel.resolve(world))
    for replica_id in range(replica_count):
        workers = plan.replica(replica_id)
        assert [w.replica_rank for w in workers] == list(range(world))
        assert {w.replica_id for w in workers} == {replica_id}
        assert [w.replica_rank for w in workers if w.is_output_rank] == [output_rank]
        for name, groups in layout.groups.items():
            # In each group, the positions that its members were told count up from 0.
            for members in groups:
                told = [workers[rank].group_ranks[name] for rank in members]
                assert told == list(range(len(members)))
