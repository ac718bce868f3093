"""What a cluster gave, against what was planned: values alone, without Ray."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.roles.ray_cluster.machines import Machine, NoRoomError, assign, wanted_devices
from phalanx.roles.ray_cluster.observed import (
    Place,
    PlacementMismatchError,
    check_layout,
    matched,
    parts_of,
    replaced,
)
from phalanx.schema.job_placement import ACTOR_GROUP
from phalanx.schema.roles import EngineGroupSpec, ModelPlacement, Ownership, PlacementMode
from tests.roles.ray_cluster.plans import planned, role_of

A, B = (Machine(f"id-{n}", f"127.0.0.{n}", f"host-{n}", 4, 4) for n in (2, 3))
MACHINES = {"id-2": A, "id-3": B}


def places(*where: tuple[Machine, int]) -> list[Place]:
    return [
        Place(index, machine.node_id, machine.address, device)
        for index, (machine, device) in enumerate(where)
    ]


def spanning():
    """One replica of eight ranks over both nodes."""
    group = EngineGroupSpec(ranks_per_replica=8, nodes_per_replica=2)
    return planned([role_of("rollout", group)], 4, 4)


ALL = [(machine, device) for machine in (A, B) for device in range(4)]


@given(st.permutations(ALL))
def test_complaint_verl_4903_ranks_follow_nodes_however_bundles_are_numbered(order):
    plan = spanning()
    (group,) = plan.groups
    found = matched(group, places(*order), {"node-0": A, "node-1": B})
    check_layout(plan, group, found, MACHINES)
    head, follower = parts_of([found[index] for index in plan.replicas[0].bundle_indices])
    assert (head.address, head.devices) == (A.address, (0, 1, 2, 3))
    assert (follower.address, follower.devices) == (B.address, (0, 1, 2, 3))
    # The actor of a machine runs in a bundle of that machine.
    assert order[head.index][0] is A and order[follower.index][0] is B


def test_complaint_slime_2373_a_replica_that_begins_in_the_middle_of_a_node_is_where_it_is():
    pairs = EngineGroupSpec(num_replicas=3, ranks_per_replica=2)
    judge = role_of("genrm", EngineGroupSpec(ranks_per_replica=2))
    plan = planned([judge, role_of("rollout", pairs)], 4, 4, mode=PlacementMode.SPLIT)
    (actor,) = plan.groups
    found = matched(actor, places(*reversed(ALL)), {"node-0": A, "node-1": B})
    check_layout(plan, actor, found, MACHINES)
    hosts = {
        replica.engine_id: parts_of([found[index] for index in replica.bundle_indices])
        for replica in plan.replicas
    }
    where = {name: [(part.address, part.devices) for part in hosts[name]] for name in hosts}
    assert where == {
        "genrm/0": [("127.0.0.2", (0, 1))],
        "rollout/0": [("127.0.0.2", (2, 3))],
        "rollout/1": [("127.0.0.3", (0, 1))],
        "rollout/2": [("127.0.0.3", (2, 3))],
    }


@given(st.permutations(range(4)))
def test_i73_a_machine_that_joins_in_the_place_of_a_lost_one_has_its_devices_in_the_same_order(
    order,
):
    plan = spanning()
    (group,) = plan.groups
    before = matched(group, places(*ALL), {"node-0": A, "node-1": B})
    again = Machine("id-new", B.address, B.host_name, 4, 4)
    found = [
        Place(4 + number, again.node_id, again.address, device)
        for number, device in enumerate(order)
    ]
    after = replaced(before, found)
    check_layout(plan, group, after, {"id-2": A, "id-new": again})
    head, follower = parts_of([after[index] for index in plan.replicas[0].bundle_indices])
    assert (head.node_id, head.devices) == (A.node_id, (0, 1, 2, 3))
    assert (follower.node_id, follower.devices) == ("id-new", (0, 1, 2, 3))
    assert order[follower.index - 4] == 0, "the actor is in the bundle of the first device"
    fewer = Machine("id-new", B.address, B.host_name, 5, 1)
    with pytest.raises(PlacementMismatchError, match=r"and 127.0.0.3 has 5"):
        check_layout(plan, group, after, {"id-2": A, "id-new": fewer})
    check_layout(plan, group, after, {"id-2": A})  # of a machine that is lost nothing is said


def refusal(plan, where, assigned=None) -> str:
    (group,) = plan.groups
    with pytest.raises(PlacementMismatchError) as caught:
        found = matched(group, places(*where), assigned or {})
        check_layout(plan, group, found, MACHINES)
    return str(caught.value)


def test_i73_a_replica_must_not_straddle_machines():
    plan = planned([role_of("rollout", EngineGroupSpec(ranks_per_replica=2))], 4)
    said = refusal(plan, [(A, 3), (B, 0)])
    assert "planned with 2 on node-0" in said and "127.0.0.2:3, 127.0.0.3:0" in said


def test_i73_bundles_to_scale_into_are_checked_too():
    kept = ModelPlacement(Ownership.CONTROLLER, (0, 1, 2, 3), (), None, None)
    plan = planned(
        [role_of("rollout", EngineGroupSpec(ranks_per_replica=2, placement=kept))],
        4,
        mode=PlacementMode.SPLIT,
    )
    found = places((A, 0), (A, 1), (A, 2), (B, 0))
    with pytest.raises(PlacementMismatchError, match="the devices of rollout/rollout/1"):
        check_layout(plan, plan.group(ACTOR_GROUP), found, MACHINES)


def test_i73_devices_of_a_replica_must_be_neighbours():
    plan = planned([role_of("rollout", EngineGroupSpec(ranks_per_replica=2))], 4)
    said = refusal(plan, [(A, 0), (A, 2)])
    assert "rollout/rollout/0" in said and "node-0:0 and node-0:1" in said
    # Of two replicas each has neighbours, and what lies between them is nobody's matter.
    two = planned([role_of("rollout", EngineGroupSpec(num_replicas=2, ranks_per_replica=1))], 4)
    found = matched(two.groups[0], places((A, 2), (A, 0)), {})
    check_layout(two, two.groups[0], found, MACHINES)


def test_i73_a_replica_over_nodes_takes_whole_machines():
    large = Machine("id-3", B.address, B.host_name, 8, 8)
    plan = spanning()
    (group,) = plan.groups
    found = matched(group, places(*ALL), {"node-0": A, "node-1": large})
    with pytest.raises(PlacementMismatchError, match="planned with 4 devices, and 127.0.0.3 has 8"):
        check_layout(plan, group, found, {"id-2": A, "id-3": large})


def test_i73_two_nodes_are_two_machines():
    said = refusal(spanning(), [(A, device) for device in range(8)])
    assert "4 on node-0, 4 on node-1" in said


def test_i73_two_bundles_are_two_devices():
    plan = planned([role_of("rollout", EngineGroupSpec(num_replicas=2))], 4)
    assert "on one device" in refusal(plan, [(A, 1), (A, 1)])


def test_a_node_that_is_named_as_a_machine_is_that_one():
    wanted = {"127.0.0.3": 2, "other": 3}
    assert assign(wanted, [A, B]) == {"127.0.0.3": B, "other": A}
    assert assign({"host-3": 1}, [A, B]) == {"host-3": B}


def test_the_smallest_gap_that_fits_is_taken():
    busy = Machine("id-3", B.address, B.host_name, 4, 2)
    assert assign({"x": 2}, [A, busy]) == {"x": busy}
    assert assign({"x": 3}, [A, busy]) == {"x": A}
    assert assign({"x": 1, "y": 4}, [A, busy]) == {"x": busy, "y": A}


def test_what_is_missing_is_said_in_numbers():
    busy = Machine("id-3", B.address, B.host_name, 4, 0)
    plan = spanning()
    with pytest.raises(NoRoomError) as caught:
        assign(wanted_devices(plan), [A, busy])
    assert str(caught.value) == (
        "it needs 8 devices (4 on node-0, 4 on node-1), and the cluster has 4 free (4 of 4 on"
        " 127.0.0.2, 0 of 4 on 127.0.0.3)"
    )
    with pytest.raises(NoRoomError, match="none of its machines has devices"):
        assign({"x": 1}, [Machine("h", "127.0.0.4", "h", 0, 0)])


def test_groups_that_are_somebody_elses_need_no_room():
    plan = planned(
        [role_of("rollout", EngineGroupSpec()), role_of("teacher", EngineGroupSpec())],
        4,
        external_groups=frozenset({"teacher"}),
    )
    assert wanted_devices(plan) == {"node-0": 1}
    assert ACTOR_GROUP not in {group.name for group in plan.groups}
