"""`phalanx up` with real engines that take turns on one simulated device, from outside."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.client import PhaseClient
from phalanx.errors import RoleOperationRefusedError
from phalanx.wire.phases import Holding
from tests.roles.control.whole_job import ENGINE, WholeJob, post, whole_job
from tests.roles.launching.specs import write_tiny_llama

# Three engines load torch. In the quick run: `test_on_managers` and `test_over_http`.
pytestmark = pytest.mark.long
ASK = {"text": "a b", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("turns")
    model = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    role = f"{{model: {model}, engine_args: {ENGINE}}}"
    path = folder / "job.yaml"
    path.write_text(
        "gateway: {http_port: 0}\n"
        "placement: {mode: defer, nodes: 1, devices_per_node: 1, device_memory_mib: 64,"
        " trainer_devices: 1}\n"
        "roles:\n"
        f"  rollout: {{models: {{student: {role}}}}}\n"
        f"  teacher: {{models: {{big: {role}}}}}\n"
    )
    return path


@pytest.fixture(scope="module")
def shared(file) -> Iterator[tuple[WholeJob, str]]:
    """The last test kills it."""
    with whole_job(file, file.parent / "cache") as job:
        yield job, job.ready()


def control(job: WholeJob) -> str:
    return job.status()["control_url"]


def answer(url: str, role: str) -> int:
    return post(f"{url}/{role}/generate", ASK)[0]


def test_i91_complaint_verl_7307_student_and_teacher_take_turns_on_one_device_by_client_and_command(
    shared,
):
    job, url = shared
    assert (answer(url, "rollout"), answer(url, "teacher")) == (503, 503)
    with PhaseClient(control(job)) as phases:
        phases.attach("t")
        phases.enter("rollout", "1")
        assert (answer(url, "rollout"), answer(url, "teacher")) == (200, 503)
        done = job.command("phase", "enter", "teacher", "--batch", "1")
        assert done.returncode == 0, done.stderr
        assert "phase: teacher of batch 1 (defer: rollout, [teacher], train)" in done.stdout
        assert "teacher has the lease of node-0:0" in done.stdout
        assert (answer(url, "rollout"), answer(url, "teacher")) == (503, 200)
        assert phases.enter("train", "1").trainer_holding is Holding.MEMORY
        assert (answer(url, "rollout"), answer(url, "teacher")) == (503, 503)
        refused = job.command("phase", "enter", "rollout", "--batch", "2")
        assert refused.returncode == 1
        assert "trainer 't' holds node-0:0 and must release" in refused.stderr
        refused = job.command("wake", "rollout")
        assert refused.returncode == 1
        assert "phalanx phase enter rollout" in refused.stderr
        phases.release("t")
        assert phases.enter("rollout", "2").batch == "2"
        assert answer(url, "rollout") == 200
        assert json.loads(job.command("phase", "--json").stdout)["phase"] == "rollout"
        assert "phase: rollout of batch 2" in job.command("status").stdout
        done = job.command("phase", "leave", "--abandon")
        assert "phase: none (defer: rollout, teacher, train)" in done.stdout


def test_d7_after_a_kill_the_batch_and_the_trainers_lease_are_known(shared, file):
    job, _ = shared
    with PhaseClient(control(job)) as phases:
        phases.attach("t", pid=os.getpid())
        phases.enter("rollout", "7")
        phases.enter("teacher", "7")
        phases.enter("train", "7")
    job.process.kill()
    assert job.ended() == -signal.SIGKILL
    with whole_job(file, job.cache) as job:
        url = job.ready()
        with PhaseClient(control(job)) as phases:
            document = phases.phases()
            assert (document.phase, document.batch, document.trainer_id) == (None, "7", "t")
            assert document.trainer_holding is Holding.MEMORY
            assert [lease.holder for lease in document.leases] == ["trainer"]
            with pytest.raises(RoleOperationRefusedError, match="must release them first"):
                phases.enter("rollout", "8")
            with pytest.raises(RoleOperationRefusedError):
                phases.attach("another", elsewhere=True)
            phases.release("t")
            phases.enter("rollout", "8")
            assert answer(url, "rollout") == 200
    assert job.process.returncode == 0, "".join(job.lines)
    job.wait_until_gone()
