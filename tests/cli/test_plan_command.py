"""`phalanx plan` as it is typed: the table, the picture, and why a job cannot be placed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

JOB = """
placement: {mode: defer, nodes: 2, devices_per_node: 2, trainer_devices: 3, device_memory_mib: 1500}
roles:
  rollout: {models: {student: {model: /no/such, replicas: 2}}}
  genrm: {models: {judge: {model: /no/such}}}
  teacher: {models: {far: {engine: external, urls: ["http://127.0.0.1:1"]}}}
"""
SHOWN = """\
defer: 2 nodes of 2 devices, 4 devices in all, simulated with 1,500 MiB each
role     model    replica    devices            placement group  owner       phases
rollout  student  student/0  node-0:0           actor            controller  rollout
rollout  student  student/1  node-0:1           actor            controller  rollout
genrm    judge    judge/0    node-0:0           actor            controller  genrm
teacher                      elsewhere          -                -           teacher
trainer                      node-0:0-1 node-1:0  actor          controller  train

device     rollout   genrm  teacher  train
node-0:0  student/0  judge/0  -  trainer
node-0:1  student/1  -  -  trainer
node-1:0  -  -  -  trainer
node-1:1  -  -  -  -
"""


@pytest.fixture
def plan(tmp_path, run):
    """Plans the text of a file; gives exit code, stdout and stderr."""

    def call(text: str, *arguments: str) -> tuple[int, str, str]:
        (tmp_path / "job.yaml").write_text(text)
        return run("plan", str(tmp_path / "job.yaml"), *arguments)

    return call


def words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_the_plan_is_a_table_and_a_picture(plan):
    code, out, err = plan(JOB)
    assert (code, err) == (0, "")
    assert words(out) == words(SHOWN)


def test_flags_win_over_the_file_and_what_stays_is_in_brackets(plan):
    changed = "placement.mode=split", "placement.trainer_devices=1"
    code, out, _ = plan(JOB, *(word for pair in changed for word in ("--set", pair)))
    assert code == 0
    assert ["node-0:0", "student/0", *["(student/0)"] * 3] in words(out)
    assert "in brackets: resident, while the phase is another's" in out


def test_i65_an_invalid_placement_is_refused_in_words(plan):
    code, out, err = plan(JOB, "--set", "placement.mode=split")
    assert (code, out) == (2, "")
    assert (
        "job.yaml: placement.mode=split needs 6 devices at the same time (rollout 2, genrm 1,"
        in err
    )
    assert "say placement.mode: defer so that they take turns" in err
    assert err.count("\n") == 1


def test_as_json_it_is_all_of_the_plan(plan):
    code, out, _ = plan(JOB, "--json")
    document = json.loads(out)
    assert code == 0
    assert document["nodes"] == [
        {"name": "node-0", "devices": 2},
        {"name": "node-1", "devices": 2},
    ]
    assert document["device_memory_bytes"] == 1500 << 20
    assert document["placement_groups"] == [
        {
            "name": "actor",
            "owner": "controller",
            "users": ["rollout", "genrm", "trainer"],
            "bundles": ["node-0:0", "node-0:1", "node-1:0"],
        }
    ]
    assert document["replicas"][1] == {
        "role": "rollout",
        "engine_id": "student/1",
        "placement_group": "actor",
        "bundles": [1],
        "devices": ["node-0:1"],
    }
    assert document["trainer_bundles"] == [0, 1, 2]
    assert document["phases"][-1] == {"name": "train", "roles": ["trainer"]}
    assert document["reservations"]["genrm"] == 0.3333


def test_the_picture_is_written_as_svg(plan, tmp_path):
    code, _, _ = plan(JOB, "--svg", str(tmp_path / "plan.svg"))
    assert code == 0
    assert "job.yaml: defer: 2 nodes of 2" in (tmp_path / "plan.svg").read_text()
    code, _, err = plan(JOB, "--svg", str(tmp_path / "no" / "plan.svg"))
    assert code == 2
    assert err.startswith("phalanx: cannot write ")


def test_many_replicas_are_one_row(plan):
    many = JOB.replace("replicas: 2", "replicas: 5000").replace(
        "devices_per_node: 2", "devices_per_node: 8"
    )
    code, out, _ = plan(many, "--set", "placement.nodes=625")
    assert code == 0
    assert "defer: 625 nodes of 8 devices, 5,000 devices in all" in out
    assert ["rollout", "student", "student/0..4999"] in [row[:3] for row in words(out)]
    assert "node-0:0-7 to node-624:0-7 (5,000)" in out
    assert len(out.splitlines()) < 20


def test_a_decoupled_job_without_nodes_has_phases_alone(plan):
    code, out, _ = plan(JOB, "--set", "placement=decoupled")
    assert code == 0
    assert out.startswith("decoupled, devices not planned")
    assert ["rollout", "not", "planned", "-", "-", "rollout"] in words(out)
    assert ["teacher", "elsewhere", "-", "-", "teacher"] in words(out)


def test_a_role_of_no_replicas_has_no_devices(plan):
    code, out, _ = plan(JOB, "--set", "roles.rollout.models.student.replicas=0")
    assert code == 0
    assert ["rollout", "none", "-", "-", "rollout"] in words(out)


def test_a_file_without_placement_has_nothing_to_plan(plan):
    code, out, err = plan(JOB.replace("placement:", "x: &x").replace("x: &x", "log: {} #"))
    assert (code, out) == (2, "")
    assert "says nothing of placement, so there is nothing to plan; add placement: split" in err


def test_real_devices_of_several_machines_need_a_cluster(run, tmp_path):
    text = JOB.replace(", device_memory_mib: 1500", "")
    (tmp_path / "job.yaml").write_text(text)
    for command in (("plan",), ("up", "--check")):
        code, _, err = run(*command, str(tmp_path / "job.yaml"))
        assert code == 2
        said = "job.yaml: launcher: kind=local starts engines on this machine, and the plan has"
        assert f"{said} devices of 2; say launcher: ray, one node in placement.nodes, or" in err
    assert run("plan", str(tmp_path / "job.yaml"), "--set", "launcher=ray")[0] == 0


def test_a_role_that_takes_turns_is_not_told_to_start_awake(run, tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    said = "roles.genrm.deployment.start_asleep"
    for command in (("plan",), ("up", "--check")):
        code, _, err = run(*command, str(file), "--set", f"{said}=false")
        assert code == 2
        assert f"job.yaml: {said}=false, and with placement: defer a role starts asleep" in err
        assert "leave start_asleep out, say true, or say placement: split" in err
    allowed = (
        (f"{said}=true",),
        (f"{said}=false", "placement.mode=split", "placement.trainer_devices=1"),
        ("roles.teacher.deployment.start_asleep=false",),  # has no devices, and takes no turns
    )
    for changes in allowed:
        words = [word for change in changes for word in ("--set", change)]
        assert run("plan", str(file), *words)[0] == 0


def test_the_check_of_a_start_shows_it_too(run, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    file = Path(tmp_path / "job.yaml")
    file.write_text(
        "placement: {mode: split, devices_per_node: 1}\n"
        'roles: {rollout: {models: {m: {engine: external, urls: ["http://127.0.0.1:1"]}}}}\n'
    )
    code, out, _ = run("up", str(file), "--check")
    assert code == 0
    assert "/rollout at http" in out
    assert "split: 1 node of 1 device" in out
