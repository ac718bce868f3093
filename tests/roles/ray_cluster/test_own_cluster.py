"""A job with `launcher: ray` on a machine without a cluster starts one for itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.roles.control.whole_job import ENGINE, PHALANX, WholeJob, environment, post
from tests.roles.launching.specs import write_tiny_llama

pytestmark = pytest.mark.long
ALONE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")
"""Ray finds the clusters of a machine by their processes; in here there are none of others."""
SCRIPT = """
"$0" up "$1"
echo "ended with $?, Ray's processes: $(grep -l rayle[t] /proc/[0-9]*/cmdline | wc -l)"
"""


@pytest.fixture
def file(tmp_path) -> Path:
    if subprocess.run([*ALONE, "true"], capture_output=True).returncode != 0:
        pytest.skip(
            "needs a namespace of processes (unshare --user --pid), which is not allowed here"
        )
    model = write_tiny_llama(tmp_path)
    engine_args = ENGINE.replace("device: cpu, ", "")
    path = tmp_path / "job.yaml"
    path.write_text(
        "placement: {mode: split, nodes: 1, devices_per_node: 2, device_memory_mib: 64}\n"
        "launcher: ray\n"
        "gateway: {http_port: 0}\n"
        "log: {directory: ./logs}\n"
        f"roles: {{rollout: {{models: {{m: {{model: {model}, devices: 2, engine_args:"
        f" {engine_args}}}}}}}}}\n"
    )
    return path


@pytest.fixture
def rays_folder():
    """Where Ray notes no cluster of others, which it would look for; sockets need a short name."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        yield folder


def test_a_cluster_that_is_started_for_a_job_has_its_devices_and_ends_with_it(
    file, tmp_path, rays_folder
):
    cache = tmp_path / "cache"
    process = subprocess.Popen(
        [*ALONE, "--kill-child", "sh", "-c", SCRIPT, PHALANX, str(file)],
        env={**environment(cache), "RAY_TMPDIR": rays_folder},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    job = WholeJob(process, cache)
    try:
        gateway = job.ready()
        sent = {"text": "a", "sampling_params": {"max_new_tokens": 2}}
        assert post(f"{gateway}/rollout/generate", sent)[0] == 200
        os.kill(job.pid(f"phalanx up {file}"), signal.SIGINT)
        assert "ended with 0, Ray's processes: 0" in job.until("ended with ")
        assert job.ended() == 0
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


def test_a_cluster_of_this_machine_that_has_ended_is_told_of_at_once(file, tmp_path):
    (tmp_path / "tmp" / "ray").mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        noted = f"127.0.0.1:{server.getsockname()[1]}"
    (tmp_path / "tmp" / "ray" / "ray_current_cluster").write_text(noted)
    file.write_text(
        file.read_text().replace("launcher: ray", "launcher: {kind: ray, address: auto}")
    )
    ended = subprocess.run(
        [*ALONE, "--kill-child", PHALANX, "up", str(file)],
        env={**environment(tmp_path / "cache"), "RAY_TMPDIR": str(tmp_path / "tmp")},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2, ended.stderr
    assert (
        "launcher.address='auto' is the cluster that this machine has joined last" in ended.stderr
    )
    port = noted.partition(":")[2]
    assert (
        f":{port} any more (Connection refused); start one with `ray start --head`" in ended.stderr
    )
