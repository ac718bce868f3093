"""`phalanx up` on simulated devices: a job whose roles do not fit together ends with the reason, and
one whose roles take turns shows who holds what.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.testing.tiny_llama import write_tiny_llama
from tests.roles.control.whole_job import ENGINE, whole_job

pytestmark = pytest.mark.long


def job_file(folder: Path, mode: str, memory_mib: int, *roles: str) -> Path:
    model = write_tiny_llama(folder / "tiny")
    entries = "".join(
        f"  {role}: {{models: {{student: {{model: {model}, engine_args: {ENGINE}}}}}}}\n"
        for role in roles
    )
    file = folder / "job.yaml"
    file.write_text(
        "gateway: {http_port: 0}\n"
        f"placement: {{mode: {mode}, nodes: [{{name: box, devices: 1}}],"
        f" device_memory_mib: {memory_mib}, trainer_devices: 0}}\n"
        f"roles:\n{entries}"
    )
    return file


def test_a_job_that_does_not_fit_ends_with_who_holds_what(tmp_path):
    file = job_file(tmp_path, "split", 1, "rollout")
    with whole_job(file, tmp_path / "cache") as job:
        assert job.ended() == 1
        told = "".join(job.lines)
        assert "simulated device 0 is out of memory: rollout/student/0" in told
        assert "for kv_cache; of 1.0 MiB" in told


def test_i64_the_status_of_a_job_says_who_holds_a_device(tmp_path):
    file = job_file(tmp_path, "defer", 2, "rollout", "teacher")
    with whole_job(file, tmp_path / "cache") as job:
        job.ready()
        (device,) = job.status()["devices"]
        assert (device["node"], device["budget_bytes"], device["held"]) == ("box", 2 << 20, [])
        for role in ("rollout", "teacher"):
            done = job.command("phase", "enter", role, "--batch", "0")
            assert done.returncode == 0, done.stderr
            (device,) = job.status()["devices"]
            assert {one["owner"] for one in device["held"]} == {f"{role}/student/0"}
            # Both at once would not fit.
            held = sum(one["num_bytes"] for one in device["held"])
            assert held <= device["peak_bytes"] <= device["budget_bytes"] < 2 * held
        assert "teacher/student/0 (weights" in job.command("status").stdout
