"""What cannot be placed is refused, with the field, its value and the ways out."""

from __future__ import annotations

import pytest

from phalanx.errors import ConfigurationError
from phalanx.roles.placement.planner import plan
from phalanx.schema.job_placement import TRAINER
from phalanx.schema.roles import EngineKind, ModelPlacement, Ownership
from tests.roles.placement.requests import (
    DECOUPLED,
    DEFER,
    SPLIT,
    group,
    nodes,
    request,
    role,
)

PHASES = {"rollout": ("rollout",), "score": ("genrm", "teacher"), "train": (TRAINER,)}
ROLES = (role("rollout", group(4)), role("genrm", group(2)), role("teacher", group(2)))
IN_ROLLOUT = "roles.rollout.models.rollout-model"


def refused(asked, *says: str) -> str:
    with pytest.raises(ConfigurationError) as error:
        plan(asked)
    message = str(error.value)
    for words in says:
        assert words in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (
            request(DEFER, nodes(3), *ROLES[1:], phases={"score": ("genrm", "teacher")}),
            "phase 'score' of placement.phases needs 4 devices at the same time (genrm 2, teacher 2),"
            " and placement.nodes have 3",
        ),
        (
            request(SPLIT, nodes(7), *ROLES),
            "placement.mode=split needs 8 devices at the same time (rollout 4, genrm 2, teacher 2)",
        ),
    ],
)
def test_i65_more_than_the_devices_hold_at_once_is_not_shared_but_refused(asked, says):
    message = refused(asked, says, "1 more in placement.nodes")
    assert "take turns" in message


def test_i65_the_same_bundles_in_the_same_phase_are_refused_with_the_alternatives():
    asked = request(
        DEFER,
        nodes(4),
        role("genrm", group(1, 2, bundles=[0, 1])),
        role("teacher", group(2, 1, bundles=[1, 2])),
        phases={"score": ("genrm", "teacher")},
    )
    refused(
        asked,
        "roles.teacher.models.teacher-model.bundles and roles.genrm.models.genrm-model.bundles both"
        " have [1] in the same phase (score)",
        "would be resident together, which is not supported",
        "phases of their own",
        "placement.mode: split",
        "more devices",
    )


def test_i65_it_is_enough_that_one_of_their_phases_is_the_same():
    asked = request(
        DEFER,
        nodes(4),
        role("rollout", group(1, 1, bundles=[0])),
        role("teacher", group(1, 1, bundles=[0])),
        phases={"a": ("teacher",), "b": ("rollout",), "c": ("rollout", "teacher")},
    )
    refused(asked, "both have [0] in the same phase (c)")


@pytest.mark.parametrize(
    ("mode", "roles", "trainer", "says"),
    [
        (SPLIT, ROLES, 1, "needs 9 devices at the same time"),
        (DECOUPLED, ROLES, 1, "placement.mode=decoupled needs 9"),
        (DEFER, ROLES, 9, "phase 'train' of placement.phases needs 9"),
        (DEFER, (role("rollout", group(9)),), 0, "phase 'rollout' of placement.phases needs 9"),
        (SPLIT, ROLES[1:], -1, "placement.trainer_devices=-1 must be at least 0"),
    ],
)
def test_i66_budgets_that_are_more_than_the_pool_are_refused(mode, roles, trainer, says):
    refused(request(mode, nodes(4, 4), *roles, trainer_devices=trainer), says)


def test_i66_a_slice_outside_of_the_pool_is_refused():
    asked = request(SPLIT, nodes(2, 2), role("rollout", group(2, 1, bundles=[3, 4])))
    refused(asked, f"{IN_ROLLOUT}.bundles has 4, and the 4 bundles are 0 to 3", "devices_per_node")


@pytest.mark.parametrize("bundles", [[0, 1, 2], [0, 1, 2, 3, 4]])
def test_i67_a_budget_that_is_no_multiple_of_an_engine_is_refused(bundles):
    asked = request(SPLIT, nodes(8), role("rollout", group(2, 2, bundles=bundles)))
    refused(asked, f"{IN_ROLLOUT}.bundles has {len(bundles)} bundles for replicas=2 of ranks=2")


def test_i67_a_bundle_that_is_given_twice_is_refused():
    asked = request(SPLIT, nodes(8), role("rollout", group(2, 1, bundles=[3, 3])))
    refused(asked, f"{IN_ROLLOUT}.bundles has [3] twice")


@pytest.mark.parametrize(
    ("engine", "ranks", "args", "says"),
    [
        (
            "sglang",
            4,
            {"tp_size": 2},
            "tp_size=2 x pp_size=1 = 2 ranks, and ranks=4; set ranks to 2",
        ),
        ("sglang", 4, {"tp-size": "8"}, "tp_size=8 x pp_size=1 = 8 ranks, and ranks=4"),
        ("sglang", 4, {"tp": 4, "pp_size": 2}, "tp_size=4 x pp_size=2 = 8 ranks, and ranks=4"),
        ("sglang", 4, {"pp_size": 3}, "ranks=4 cannot be cut into 3 equal parts"),
        ("sglang", 4, {"tp_size": 4, "dp_size": 2}, "x dp_size=2 = 8 ranks, and ranks=4"),
        (
            "sglang",
            4,
            {"tp_size": 4, "dp_size": 3, "enable_dp_attention": True},
            "engine_args.dp_size=3 does not divide tp_size=4",
        ),
        ("sglang", 4, {"tp_size": 0}, "engine_args.tp_size=0 must be a whole number from 1"),
        ("phalanx", 4, {"tp": 2}, "engine_args make 2 ranks, and ranks=4; set ranks to 2"),
        ("phalanx", 2, {"replicas": 2}, "engine_args make replicas=2 x 2 ranks = 4, and ranks=2"),
        (
            "phalanx",
            4,
            {"parallel.outer.pipeline_size": 2, "parallel.dense.tp_size": 4},
            "engine_args make 8 ranks, and ranks=4",
        ),
        (
            "phalanx",
            4,
            {"parallel.attention.dp_size": 3, "parallel.dense.tp_size": 4},
            "attention.dp_size=3",
        ),
        ("phalanx", 2, {"parallel.dense.tp_size": "two"}, "parallel.dense.tp_size"),
    ],
)
def test_i67_flags_that_make_another_number_of_ranks_are_refused(engine, ranks, args, says):
    flawed = group(1, ranks, engine=EngineKind(engine), engine_args=args)
    refused(request(SPLIT, nodes(8), role("rollout", flawed)), f"{IN_ROLLOUT}: ", says)


@pytest.mark.parametrize(
    ("engine", "ranks", "args"),
    [
        ("sglang", 8, {"tp_size": 4, "pp_size": 2}),
        ("sglang", 8, {"tp_size": 8, "dp_size": 4, "enable_dp_attention": True}),
        ("sglang", 8, {"pp_size": 2, "dp_size": 2}),
        ("sglang", 8, {}),
        ("phalanx", 8, {"tp": 4, "replicas": 2}),
        ("phalanx", 8, {"parallel.outer.pipeline_size": 2, "parallel.attention.tp_size": 4}),
        ("phalanx", 8, {"num_threads": 1}),
    ],
)
def test_i67_flags_that_make_as_many_ranks_are_taken(engine, ranks, args):
    right = group(1, ranks, engine=EngineKind(engine), engine_args=args)
    plan(request(SPLIT, nodes(8), role("rollout", right)))


def test_i69_split_slices_that_overlap_are_refused_with_the_alternatives():
    asked = request(
        SPLIT,
        nodes(4),
        role("rollout", group(2, 1, bundles=[0, 1])),
        role("genrm", group(2, 1, bundles=[1, 2])),
    )
    refused(
        asked,
        "roles.genrm.models.genrm-model.bundles and roles.rollout.models.rollout-model.bundles both"
        " have [1], and would be resident together",
        "disjoint bundles",
        "placement.mode: defer",
        "more devices",
    )


def test_i69_groups_of_one_role_may_not_overlap_either():
    first, second = group(1, 1, bundles=[0]), group(1, 1, bundles=[0])
    message = refused(request(DEFER, nodes(4), role("rollout", first, second)))
    assert f"{IN_ROLLOUT}.groups[1].bundles and {IN_ROLLOUT}.groups[0].bundles" in message


def test_i69_no_room_beside_what_was_given_is_refused():
    asked = request(
        SPLIT,
        nodes(4),
        role("rollout", group(1, 2)),
        role("genrm", group(2, 1, bundles=[1, 2])),
    )
    refused(asked, f"{IN_ROLLOUT}: replicas=1 of ranks=2 find no room beside the bundles")


@pytest.mark.parametrize(
    ("phases", "says"),
    [
        (
            {"rollout": ("rollout",), "score": ("genrm",), "train": (TRAINER,)},
            "placement.phases has none of 'teacher', which therefore could never be resident",
        ),
        (
            {"rollout": ("rollout",), "score": ("genrm", "teacher")},
            "placement.phases has none of 'trainer'",
        ),
        (
            {**PHASES, "x": ("techer",)},
            "placement.phases: x has 'techer', which is no role of this job; did you mean",
        ),
        ({**PHASES, "x": ()}, "placement.phases: x has no roles; name some of rollout, genrm"),
        ({**PHASES, "x": ("genrm", "genrm")}, "placement.phases: x has 'genrm' twice"),
        (
            {**PHASES, "train": ("genrm", TRAINER)},
            "train has the trainer and genrm; with placement.mode=defer the trainer begins when",
        ),
        (
            {**PHASES, "all": ("rollout", "genrm", "teacher")},
            "phase 'all' of placement.phases needs 8 devices at the same time",
        ),
    ],
)
def test_i70_schedules_that_leave_somebody_out_or_too_many_in_are_refused(phases, says):
    refused(request(DEFER, nodes(4), *ROLES, trainer_devices=4, phases=phases), says)


def test_i70_a_phase_of_the_same_name_twice_is_refused():
    asked = request(DEFER, nodes(4), *ROLES, phases=PHASES)
    twice = type(asked)(asked.mode, asked.cluster, asked.roles, 0, (*asked.phases, asked.phases[0]))
    refused(twice, "placement.phases: rollout is given twice")


def test_i70_in_split_the_phases_may_leave_roles_out_but_name_no_others():
    plan(request(SPLIT, nodes(8), *ROLES, phases={"rollout": ("rollout",)}))
    refused(request(SPLIT, nodes(8), *ROLES, phases={"a": ("b",)}), "a has 'b', which is no role")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (
            request(SPLIT, nodes(8), *ROLES, external_groups={"genrm"}),
            "placement.external_groups has genrm, and with placement.mode=split all roles are in the"
            " one group 'actor', which the controller makes and deletes",
        ),
        (
            request(DECOUPLED, nodes(8), *ROLES, external_groups={"judge"}),
            "placement.external_groups has 'judge', which is no role; roles: rollout, genrm, teacher",
        ),
        (
            request(DECOUPLED, nodes(8), role("rollout", group(1, 1, bundles=[0]))),
            "bundles=[0] is given with placement.mode=decoupled, where each role has a group of its",
        ),
        (
            request(
                SPLIT, nodes(8), role("rollout", group(1, 1, bundles=[0], owner=Ownership.MANAGER))
            ),
            "pg_owner='manager' for bundles of the group 'actor', which the controller makes",
        ),
        (
            request(
                SPLIT, nodes(8), role("rollout", group(1, 1, bundles=[0], owner=Ownership.EXTERNAL))
            ),
            "pg_owner='external' for bundles of the group 'actor'",
        ),
    ],
)
def test_i71_a_group_that_somebody_else_would_own_is_refused(asked, says):
    refused(asked, says)


def test_what_a_program_says_beside_the_bundles_has_to_be_so():
    asked = request(SPLIT, nodes(2, 2), role("rollout", group(1, 1, bundles=[2], gpu_ids=(1,))))
    refused(asked, "gpu_ids=(1,), and by its bundles and phases it is (0,)")
    said = ModelPlacement(Ownership.CONTROLLER, (0,), (0,), "actor", "genrm")
    flawed = EngineKind.PHALANX, said
    message = refused(
        request(DEFER, nodes(2), role("rollout", _placed(*flawed)), role("genrm")),
    )
    assert "activation_phase='genrm', and by its bundles and phases it is 'rollout'" in message


def _placed(engine, placement):
    made = group(1, 1, engine=engine)
    return type(made)(engine=engine, placement=placement)


@pytest.mark.parametrize("name", [TRAINER, "actor"])
def test_names_with_a_meaning_are_no_roles(name):
    refused(
        request(DECOUPLED, nodes(), role(name)), f"roles.{name}: {name!r} is the name of the tr"
    )


def test_a_role_with_another_word_than_the_job_is_refused():
    asked = request(SPLIT, nodes(4), role("rollout", placement=DEFER))
    refused(
        asked, "roles.rollout.deployment.placement='defer', and placement.mode='split' is the whole"
    )


def test_a_role_that_is_given_twice_is_refused():
    refused(
        request(SPLIT, nodes(4), role("rollout"), role("rollout")), "roles.rollout is given twice"
    )
