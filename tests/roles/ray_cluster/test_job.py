"""`phalanx up` with launcher: ray, seen from the cluster."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from phalanx.device_ledger import DeviceLedger
from phalanx.roles.calls import PollPause
from tests.roles.control.whole_job import ENGINE, WholeJob, post, whole_job
from tests.roles.launching.processes import wait_for_end, watched
from tests.roles.launching.specs import write_tiny_llama
from tests.roles.ray_cluster.running import actors_there, all_free, groups_there

pytestmark = pytest.mark.long


@pytest.fixture
def file(tmp_path, machines, cluster) -> Path:
    """Two roles that take the same devices of a machine in turns."""
    (tmp_path / "tiny").mkdir()
    write_tiny_llama(tmp_path / "tiny")
    return job_file(tmp_path, machines.address)


def job_file(folder: Path, address: str, devices: int = 4, wanted: int = 1) -> Path:
    engine_args = ENGINE.replace("device: cpu, ", "")
    model = f"{{model: ./tiny, devices: {wanted}, engine_args: {engine_args}}}"
    file = folder / "job.yaml"
    file.write_text(
        f"placement: {{mode: split, nodes: 1, devices_per_node: {devices},"
        " device_memory_mib: 200, trainer_devices: 1}\n"
        f"launcher: {{kind: ray, address: '{address}', namespace: jobs, deadline_s: 1}}\n"
        "gateway: {http_port: 0}\n"
        "log: {directory: ./logs}\n"
        "roles:\n"
        f"  rollout: {{models: {{student: {model}}}}}\n"
    )
    return file


def engine(job: WholeJob) -> tuple[int, str]:
    """Its process, and where it listens."""
    (shown,) = job.engines()
    port = shown["base_url"].rpartition(":")[2]
    (pid,) = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdecimal() and f"--port\0{port}\0" in command(entry)
    ]
    return pid, shown["base_url"]


def command(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


async def nothing_left(cluster) -> None:
    """Ray notices an owner's death by itself."""
    pause = PollPause()
    while groups_there() or actors_there():
        await pause.rest()
    await all_free(cluster)


def test_i74_a_job_runs_on_the_cluster_and_deletes_what_it_made(file, cluster, tmp_path):
    with whole_job(file, tmp_path / "cache") as job:
        gateway = job.ready()
        pid, url = engine(job)
        assert url.startswith(("http://127.0.0.2:", "http://127.0.0.3:"))
        assert groups_there() == {"default-actor"} and len(actors_there()) == 1
        sent = {"text": "a", "sampling_params": {"max_new_tokens": 2}}
        status, answer = post(f"{gateway}/rollout/generate", sent)
        assert status == 200 and answer["meta_info"]["completion_tokens"] == 2
        (ledger,) = (tmp_path / "logs").glob("devices-*")
        assert {held.owner for held in DeviceLedger(ledger).held()} == {"rollout/student/0"}
        status = job.status()
        trainer = status["trainer_environment"]["PHALANX_SIMULATED_DEVICES"]
        assert trainer == f"{ledger}:1@trainer"
        mine, theirs = status["devices"]
        machine = url.removeprefix("http://").partition(":")[0]
        assert [each["place"] for each in (mine, theirs)] == [f"{machine}:0", f"{machine}:1"]
        assert {one["owner"] for one in mine["held"]} == {"rollout/student/0"}
        assert mine["peak_bytes"] >= sum(one["num_bytes"] for one in mine["held"]) > 0
        assert (theirs["held"], theirs["budget_bytes"]) == ([], 200 << 20)
        with watched(pid) as processes:
            job.process.send_signal(signal.SIGINT)
            assert job.ended() == 0
            wait_for_end(processes)
        assert not groups_there() and not actors_there()


def test_i74_each_decoupled_group_is_deleted_by_its_owner_and_one_of_somebody_else_by_nobody_here(
    file, machines, cluster, tmp_path
):
    roles = file.read_text().replace("mode: split", "mode: decoupled, external_groups: [teacher]")
    roles = roles.replace("trainer_devices: 1", "trainer_devices: 0")
    roles = roles.replace("namespace: jobs", f"namespace: {cluster.namespace}")
    last = roles.splitlines()[-1]
    file.write_text(f"{roles}{last.replace('rollout:', 'teacher:')}\n")

    async def with_theirs() -> None:
        theirs = await cluster.create_group(
            "teacher", [{"GPU": 1, "CPU": 0.2}], "STRICT_PACK", 30.0
        )
        await asyncio.to_thread(up)
        assert groups_there() == {"teacher"}
        await cluster.remove_group(theirs)
        await all_free(cluster)

    def up() -> None:
        with whole_job(file, tmp_path / "cache") as job:
            gateway = job.ready()
            assert groups_there() == {"default-rollout", "teacher"}
            sent = {"text": "a", "sampling_params": {"max_new_tokens": 2}}
            for role in ("rollout", "teacher"):
                assert post(f"{gateway}/{role}/generate", sent)[0] == 200
            job.process.send_signal(signal.SIGINT)
            assert job.ended() == 0, "".join(job.lines)

    asyncio.run(with_theirs())


def test_i75_a_job_that_is_killed_leaves_nothing_on_the_cluster(file, cluster, tmp_path):
    with whole_job(file, tmp_path / "cache") as job:
        job.ready()
        pid, _ = engine(job)
        with watched(pid) as processes:
            job.process.kill()
            job.ended()
            wait_for_end(processes)
        asyncio.run(nothing_left(cluster))


def test_i72_a_refused_plan_has_made_nothing(file, machines, cluster, tmp_path):
    before = actors_there(), groups_there()
    assert before == (set(), set())
    with whole_job(job_file(tmp_path, machines.address, 1, 2), tmp_path / "cache") as job:
        assert job.ended() == 2
        assert "launcher" not in "".join(job.lines)
    with whole_job(job_file(tmp_path, machines.address, 6, 5), tmp_path / "cache") as job:
        assert job.ended() == 1
        assert "it needs 6 devices (6 on node-0), and the cluster has 8 free" in "".join(job.lines)
    assert (actors_there(), groups_there()) == before
