"""What a job's file says of placement, and how mistakes in it are named."""

from __future__ import annotations

import pytest

from phalanx.errors import ConfigurationError
from phalanx.roles.config import parse_job
from phalanx.schema.job_placement import TRAINER, ClusterSpec, NodeSpec, PhaseSpec
from phalanx.schema.roles import Ownership
from tests.roles.placement.requests import DECOUPLED, DEFER, SPLIT, where

ROLES = """
roles:
  rollout: {models: {student: {model: a, replicas: 2, ranks: 2}}}
  genrm: {models: {judge: {model: b}}}
  teacher: {models: {big: {model: c, devices: 4, ranks: 2}}}
"""
STUDENT = "roles.rollout.models.student"


def job(placement: str, roles: str = ROLES):
    return parse_job(f"placement: {placement}\n{roles}", "j.yaml")


def planned(placement: str, roles: str = ROLES):
    made = job(placement, roles)
    assert made.plan is not None
    assert made.roles == made.plan.roles
    return made.plan


@pytest.mark.parametrize("mode", [DECOUPLED, SPLIT, DEFER])
def test_a_word_alone_is_the_mode(mode):
    assert planned(mode.value) == planned(f"{{mode: {mode.value}}}")
    assert planned(mode.value).mode is mode


def test_a_file_that_says_nothing_is_not_planned():
    made = parse_job(ROLES, "j.yaml")
    assert made.plan is None
    assert not any(
        group.placement
        for role in made.roles
        for model in role.models
        for group in model.engine_groups
    )


def test_the_whole_section_is_read():
    made = planned(
        "{mode: defer, nodes: 2, devices_per_node: 4, device_memory_mib: 1500, trainer_devices: 2,"
        " phases: [rollout, {name: score, roles: [genrm, teacher]}, train]}"
    )
    assert made.cluster == ClusterSpec((NodeSpec("node-0", 4), NodeSpec("node-1", 4)), 1500 << 20)
    assert made.phases == (
        PhaseSpec("rollout", ("rollout",)),
        PhaseSpec("score", ("genrm", "teacher")),
        PhaseSpec("train", (TRAINER,)),
    )
    assert made.trainer_bundles == (0, 1)
    # The judge has node-0:0, so that two teachers of two are not both on that node.
    assert where(made)["big/0"] == ["node-0:1", "node-0:2"]
    assert where(made)["big/1"] == ["node-1:0", "node-1:1"]


def test_nodes_may_be_listed_by_name():
    made = planned("{mode: split, devices_per_node: 8, nodes: [{name: a}, {name: b, devices: 2}]}")
    assert made.cluster.nodes == (NodeSpec("a", 8), NodeSpec("b", 2))


def test_external_groups_are_somebody_elses():
    made = planned("{mode: decoupled, devices_per_node: 9, external_groups: [genrm]}")
    assert [group.owner for group in made.groups] == [
        Ownership.MANAGER,
        Ownership.EXTERNAL,
        Ownership.MANAGER,
    ]


def test_devices_of_a_group_are_cut_into_replicas():
    (big,) = planned("split").roles[2].models
    assert big.engine_groups[0].num_replicas == 2


def test_bundles_of_a_group_are_its_replicas_and_perhaps_more_to_scale_into():
    text = "roles: {rollout: {models: {student: {model: a, ranks: 2, bundles: [2, 3, 0, 1]}}}}"
    made = planned("{mode: split, devices_per_node: 4}", text)
    assert where(made) == {
        "student/0": ["node-0:2", "node-0:3"],
        "student/1": ["node-0:0", "node-0:1"],
    }
    made = planned("split", text.replace("ranks", "replicas: 1, ranks"))
    assert where(made) == {"student/0": ["node-0:2", "node-0:3"]}


def test_a_group_may_need_several_nodes():
    text = "roles: {rollout: {models: {student: {model: a, ranks: 4, nodes: 2}}}}"
    made = planned("{mode: split, nodes: 2, devices_per_node: 2}", text)
    assert where(made) == {"student/0": ["node-0:0", "node-0:1", "node-1:0", "node-1:1"]}


def test_a_role_may_repeat_the_word_of_the_job():
    said = ROLES.replace("rollout: {", "rollout: {deployment: {placement: defer}, ")
    assert planned("defer", said) == planned("defer")


def student(keys: str) -> str:
    return f"roles: {{rollout: {{models: {{student: {{model: a, {keys}}}}}}}}}"


@pytest.mark.parametrize(
    ("placement", "roles", "says"),
    [
        ("defr", ROLES, "placement.mode='defr' is not known; allowed: decoupled, split, defer"),
        ("3", ROLES, "placement must hold keys of its own"),
        ("{node: 3}", ROLES, "unknown key placement.node; did you mean placement.nodes?"),
        ("{nodes: 0}", ROLES, "placement: nodes=0 must be at least 1"),
        ("{nodes: 2}", ROLES, "placement: nodes=2 is given without devices_per_node"),
        ("{nodes: []}", ROLES, "placement: nodes is empty"),
        ("{nodes: [{name: a}]}", ROLES, "placement: nodes[0] (a) has no devices"),
        ("{nodes: [{nam: a}]}", ROLES, "did you mean placement.nodes[0].name?"),
        ("{nodes: [{name: a b, devices: 1}]}", ROLES, "placement: node name 'a b' must begin"),
        (
            "{devices_per_node: 1, nodes: [{name: a}, {name: a}]}",
            ROLES,
            "node 'a' is given 2 times",
        ),
        ("{devices_per_node: 0}", ROLES, "placement: devices_per_node=0 must be at least 1"),
        ("{device_memory_mib: 0}", ROLES, "placement: device_memory_mib=0 must be from 1 to"),
        (
            "{device_memory_mib: 9999999999999}",
            ROLES,
            "device_memory_mib=9999999999999 must be from",
        ),
        (
            "{nodes: 1000000000, devices_per_node: 8}",
            ROLES,
            "placement: nodes=1000000000 of devices_per_node=8 are 8,000,000,000 devices, and a plan"
            " has at most 1,000,000",
        ),
        (
            "{nodes: [{name: a, devices: 10000000000}]}",
            ROLES,
            "placement: nodes are 10,000,000,000 devices, and a plan has at most 1,000,000",
        ),
        (
            "{mode: split, trainer_devices: 3000000}",
            ROLES,
            "needs 3,000,009 devices (rollout 4, genrm 1, teacher 4, trainer 3,000,000), and a plan"
            " has at most 1,000,000; give fewer replicas, smaller ranks or fewer trainer_devices",
        ),
        (
            "split",
            student("bundles: [99999999999]"),
            f"{STUDENT}.bundles has 99999999999, and a plan has at most 1,000,000 devices",
        ),
        (
            "{mode: split, phases: [rolout]}",
            ROLES,
            "placement.phases has 'rolout', which is no role of this",
        ),
        (
            "{mode: split, phases: [{name: a}]}",
            ROLES,
            "placement.phases[0]: Object missing required",
        ),
        (
            "{mode: split, phases: [rollout, {nam: a}]}",
            ROLES,
            "did you mean placement.phases[1].name?",
        ),
        (
            "{mode: split, devices_per_node: 8}",
            ROLES,
            "placement.mode=split needs 9 devices at the",
        ),
        (
            "{mode: split}",
            student("ranks: 2, devices: 3"),
            f"{STUDENT}: devices=3 cannot be cut into engines of ranks=2; give a multiple of 2",
        ),
        (
            "{mode: split}",
            student("ranks: 2, bundles: [0]"),
            f"{STUDENT}: 1 bundles cannot be cut into engines of ranks=2",
        ),
        (
            "{mode: split}",
            student("replicas: 1, devices: 1"),
            f"{STUDENT}: replicas=1 and devices=1 are both given",
        ),
        (
            "{mode: split}",
            student("nodes: 0"),
            f"{STUDENT}.nodes=0 must be at least 1",
        ),
        (
            "{mode: split}",
            "roles: {teacher: {models: {a: {engine: external, urls: ['http://h:1'], devices: 1}}}}",
            "devices=1 is given for engine: external",
        ),
        (
            "{mode: split}",
            "roles: {teacher: {models: {a: {engine: external, urls: ['http://h:1'], bundles: [0]}}}}",
            "roles.teacher.models.a has bundles, and engine: external",
        ),
        (
            "{mode: split}",
            ROLES.replace("rollout: {", "rollout: {deployment: {placement: defer}, "),
            "roles.rollout.deployment.placement='defer', and the job's placement is split",
        ),
        (
            "{mode: split}",
            ROLES.replace("rollout: {", "rollout: {deployment: {placement: decoupled}, "),
            "roles.rollout.deployment.placement='decoupled', and the job's placement is split",
        ),
        ("null", student("bundles: [0]"), "roles.rollout has bundles, and the job no placement"),
        (
            "null",
            "roles: {trainer: {workload: teacher, models: {a: {model: x}}}}",
            "roles.trainer: 'trainer' is the name of the trainer in phases; choose another name",
        ),
    ],
)
def test_i9_mistakes_are_named_with_their_place(placement, roles, says):
    with pytest.raises(ConfigurationError) as refused:
        job(placement, roles)
    message = str(refused.value)
    assert message.startswith("j.yaml: ")
    assert message.count("j.yaml") == 1
    assert says in message
    assert "\n" not in message
