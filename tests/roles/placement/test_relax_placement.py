"""Arguments of Relax as what the planner is asked: the same bundles, and the trainer's turn."""

from __future__ import annotations

import pytest

from phalanx.errors import ConfigurationError
from phalanx.roles.placement.planner import plan
from phalanx.roles.relax_args import from_relax_args
from phalanx.roles.relax_placement import placement_of_relax_args
from phalanx.schema.job_placement import TRAINER
from phalanx.schema.roles import Ownership
from tests.roles.launching.test_relax_args import (
    COLOCATED,
    DEFERRED,
    FULLY_ASYNC,
    SEVERAL_TEACHERS,
)
from tests.roles.placement.requests import DECOUPLED, DEFER, nodes, violations


def planned(arguments, **given):
    asked = placement_of_relax_args(arguments, **given)
    made = plan(asked)
    assert violations(asked, made) == []
    return made


def bundles(roles) -> list[tuple[int, ...]]:
    return [
        group.placement.bundle_indices
        for role in roles
        for model in role.models
        for group in model.engine_groups
    ]


@pytest.mark.parametrize("arguments", [COLOCATED, SEVERAL_TEACHERS, DEFERRED])
def test_i60_roles_on_the_trainers_devices_keep_their_bundles(arguments):
    made = planned(arguments)
    assert made.mode is DEFER
    assert bundles(made.roles) == bundles(from_relax_args(arguments))
    assert made.bundles_of(TRAINER) == set(made.groups[0].bundles)
    assert made.groups[0].owner is Ownership.CONTROLLER


def test_i60_where_each_role_has_its_own_they_take_turns_with_the_trainer_alone():
    made = planned(SEVERAL_TEACHERS)
    assert [node.num_devices for node in made.cluster.nodes] == [8, 8]
    assert [(phase.name, phase.roles) for phase in made.phases] == [
        ("inference", ("rollout", "teacher")),
        ("train", (TRAINER,)),
    ]


def test_i60_scorers_that_are_deferred_have_phases_of_their_own():
    made = planned(DEFERRED)
    assert [phase.name for phase in made.phases] == ["rollout", "genrm", "teacher", "train"]
    assert all(role.deployment.start_asleep for role in made.roles)


def test_i60_apart_from_the_trainer_each_has_a_group_of_its_own():
    made = planned(FULLY_ASYNC)
    assert made.mode is DECOUPLED
    assert [(group.name, len(group.bundles)) for group in made.groups] == [
        ("rollout", 3),
        ("genrm", 2),
        ("actor", 2),
    ]
    assert not planned({**FULLY_ASYNC, "debug_rollout_only": True}).trainer_bundles


def test_i60_engines_larger_than_a_machine_and_groups_with_gaps_find_machines_enough():
    large = {"hf_checkpoint": "/s", "rollout_num_gpus": 32, "rollout_num_gpus_per_engine": 16}
    made = planned(large)
    assert len(made.replicas) == 2
    gaps = {**large, "rollout_num_gpus": 15, "rollout_num_gpus_per_engine": 3}
    assert len(planned(gaps).replicas) == 5


def test_i60_a_cluster_that_is_given_is_checked():
    with pytest.raises(ConfigurationError, match="needs 8 devices at the same time .* have 4"):
        planned(COLOCATED, cluster=nodes(4))
    with pytest.raises(ConfigurationError, match="would straddle nodes"):
        planned(COLOCATED, cluster=nodes(3, 5))
