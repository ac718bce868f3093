"""How roles share devices in each mode, who owns the groups, and in which phases they are resident."""

from __future__ import annotations

import pytest

from phalanx.roles.placement.planner import plan
from phalanx.roles.placement.reservations import shares
from phalanx.schema.job_placement import ACTOR_GROUP, TRAINER
from phalanx.schema.roles import ModelPlacement, Ownership
from tests.roles.placement.requests import (
    DECOUPLED,
    DEFER,
    SPLIT,
    external,
    group,
    nodes,
    request,
    role,
    violations,
    where,
)

THREE = (role("rollout", group(2, 2)), role("genrm"), role("teacher", group(1, 2)))


def placement(made, name: str) -> ModelPlacement | None:
    (spec,) = (each for each in made.roles if each.role == name)
    return spec.models[0].engine_groups[0].placement


def test_i62_decoupled_roles_have_a_group_each():
    asked = request(DECOUPLED, nodes(4, 4, 4), *THREE, trainer_devices=3)
    made = plan(asked)
    assert violations(asked, made) == []
    assert [(one.name, one.owner.value, len(one.bundles)) for one in made.groups] == [
        ("rollout", "manager", 4),
        ("genrm", "manager", 1),
        ("teacher", "manager", 2),
        (ACTOR_GROUP, "controller", 3),
    ]
    assert where(made) == {
        "rollout-model/0": ["n0:0", "n0:1"],
        "rollout-model/1": ["n0:2", "n0:3"],
        "genrm-model/0": ["n1:0"],
        "teacher-model/0": ["n1:1", "n1:2"],
    }
    # A bundle's number is its place in the role's own group.
    assert placement(made, "teacher") == ModelPlacement(
        Ownership.MANAGER, (0, 1), (1, 2), None, None
    )
    assert made.trainer_bundles == (0, 1, 2)


def test_i62_training_and_inference_may_overlap_in_time():
    made = plan(request(DECOUPLED, nodes(4, 4, 4), *THREE, trainer_devices=3))
    assert not any(spec.deployment.start_asleep for spec in made.roles)
    users = [made.bundles_of(user) for user in made.users()]
    assert sum(map(len, users)) == len(frozenset().union(*users)) == 10


def test_i62_a_decoupled_job_without_nodes_has_phases_and_no_devices():
    made = plan(request(DECOUPLED, nodes(), *THREE))
    assert made.groups == made.replicas == ()
    assert made.roles == THREE
    assert [phase.name for phase in made.phases] == ["rollout", "genrm", "teacher", "train"]
    assert made.bundles_of("rollout") == frozenset()


def test_i71_the_group_of_a_decoupled_role_is_its_managers_or_somebody_elses():
    made = plan(request(DECOUPLED, nodes(8), *THREE, external_groups={"teacher"}))
    assert [one.owner for one in made.groups] == [
        Ownership.MANAGER,
        Ownership.MANAGER,
        Ownership.EXTERNAL,
    ]
    assert placement(made, "teacher").pg_owner is Ownership.EXTERNAL


def test_a_decoupled_job_that_says_something_of_devices_is_planned():
    assert plan(request(DECOUPLED, nodes(), *THREE, trainer_devices=2)).cluster.num_devices == 9
    assert plan(request(DECOUPLED, nodes(memory=1), *THREE)).cluster.num_devices == 7


@pytest.mark.parametrize("mode", [SPLIT, DEFER])
def test_i71_the_one_group_of_a_colocated_job_is_the_controllers(mode):
    made = plan(request(mode, nodes(8), *THREE, trainer_devices=1))
    (only,) = made.groups
    assert (only.name, only.owner) == (ACTOR_GROUP, Ownership.CONTROLLER)
    assert only.users == ("rollout", "genrm", "teacher", TRAINER)
    for spec in made.roles:
        assert placement(made, spec.role).pg_owner is Ownership.CONTROLLER


def test_i63_split_roles_have_slices_of_the_one_group():
    asked = request(SPLIT, nodes(4, 4), *THREE, trainer_devices=1)
    made = plan(asked)
    assert violations(asked, made) == []
    assert placement(made, "rollout").bundle_indices == (0, 1, 2, 3)
    assert placement(made, "genrm").bundle_indices == (4,)
    assert placement(made, "teacher") == ModelPlacement(
        Ownership.CONTROLLER, (5, 6), (1, 2), None, None
    )
    assert made.trainer_bundles == (7,)
    assert not any(spec.deployment.start_asleep for spec in made.roles)
    assert {spec.deployment.placement for spec in made.roles} == {SPLIT}


def test_i64_deferred_roles_have_the_same_bundles_in_phases_of_their_own():
    asked = request(DEFER, nodes(4), *THREE, trainer_devices=4)
    made = plan(asked)
    assert violations(asked, made) == []
    assert len(made.groups[0].bundles) == 4
    assert placement(made, "rollout").bundle_indices == (0, 1, 2, 3)
    assert placement(made, "genrm") == ModelPlacement(
        Ownership.CONTROLLER, (0,), (0,), ACTOR_GROUP, "genrm"
    )
    assert made.trainer_bundles == (0, 1, 2, 3)
    assert all(spec.deployment.start_asleep for spec in made.roles)
    assert [(phase.name, phase.roles) for phase in made.phases] == [
        ("rollout", ("rollout",)),
        ("genrm", ("genrm",)),
        ("teacher", ("teacher",)),
        ("train", (TRAINER,)),
    ]


def test_i64_roles_of_one_phase_have_bundles_of_their_own():
    phases = {"rollout": ("rollout",), "score": ("genrm", "teacher"), "train": (TRAINER,)}
    asked = request(DEFER, nodes(4), *THREE, trainer_devices=4, phases=phases)
    made = plan(asked)
    assert violations(asked, made) == []
    assert placement(made, "genrm").bundle_indices == (0,)
    assert placement(made, "teacher").bundle_indices == (1, 2)
    assert placement(made, "teacher").activation_phase == "score"


def test_a_role_may_have_several_phases():
    phases = {
        "rollout": ("rollout",),
        "teacher": ("teacher", "genrm"),
        "student_score": ("rollout", "genrm"),
        "train": (TRAINER,),
    }
    asked = request(
        DEFER,
        nodes(4),
        role("rollout", group(3)),
        role("genrm"),
        role("teacher", group(3)),
        trainer_devices=4,
        phases=phases,
    )
    made = plan(asked)
    assert violations(asked, made) == []
    assert placement(made, "rollout").activation_phase == "rollout"
    assert made.bundles_of("rollout") == made.bundles_of("teacher")


def test_phases_come_in_the_order_of_what_needs_what():
    made = plan(
        request(DEFER, nodes(1), role("teacher"), role("grader", workload="genrm"), role("rollout"))
    )
    assert [phase.name for phase in made.phases] == ["rollout", "grader", "teacher", "train"]


def test_without_nodes_there_are_as_many_devices_as_are_needed():
    assert plan(request(SPLIT, nodes(), *THREE, trainer_devices=2)).cluster.num_devices == 9
    made = plan(request(DEFER, nodes(memory=7), *THREE, trainer_devices=2))
    assert made.cluster.num_devices == 4
    assert made.cluster.device_memory_bytes == 7
    far = request(SPLIT, nodes(), role("rollout", group(1, 1, bundles=[5])), role("genrm"))
    assert plan(far).cluster.num_devices == 6


def test_external_engines_need_no_devices_and_are_not_put_to_sleep():
    asked = request(DEFER, nodes(1), role("rollout"), role("teacher", external(3)))
    made = plan(asked)
    assert violations(asked, made) == []
    assert [one.role for one in made.replicas] == ["rollout"]
    rollout, teacher = made.roles
    assert rollout.deployment.start_asleep and not teacher.deployment.start_asleep
    assert teacher.deployment.placement is DECOUPLED


def test_bundles_that_were_given_are_kept_and_others_find_room_between_them():
    asked = request(
        SPLIT,
        nodes(4, 4),
        role("rollout", group(1, 2)),
        role("genrm", group(1, 1, bundles=[1])),
        role("teacher", group(1, 2, bundles=[4, 5, 6, 7])),
    )
    made = plan(asked)
    assert violations(asked, made) == []
    assert where(made)["rollout-model/0"] == ["n0:2", "n0:3"]
    assert placement(made, "teacher").bundle_indices == (4, 5, 6, 7)
    # The bundles to scale into are the role's, too.
    assert len(made.bundles_of("teacher")) == 4


@pytest.mark.parametrize("mode", [DECOUPLED, SPLIT, DEFER])
def test_what_the_users_of_a_bundle_reserve_is_at_most_the_whole(mode):
    made = plan(request(mode, nodes(12), *THREE, trainer_devices=3))
    reserved = shares(made)
    assert reserved.keys() == set(made.users())
    sums = {
        bundle: sum(reserved[user] for user in made.users() if bundle in made.bundles_of(user))
        for each in made.groups
        for bundle in each.bundles
    }
    assert max(sums.values()) <= 1.0
    assert reserved["genrm"] == (0.25 if mode is DEFER else 1.0)


def test_a_plan_depends_on_nothing_but_the_request():
    asked = request(DEFER, nodes(4, 4), *THREE, trainer_devices=4)
    assert plan(asked) == plan(asked)
