"""`phalanx up` with real engines: it serves, and whatever is killed, nothing lingers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.roles.control.whole_job import ENGINE, WholeJob, get, job_file, post, whole_job
from tests.roles.launching.specs import write_tiny_llama

ASK = {"text": "a b", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory, model) -> Iterator[tuple[WholeJob, str]]:
    folder = tmp_path_factory.mktemp("job")
    with whole_job(job_file(folder, model), folder / "cache") as job:
        yield job, job.ready()
    assert job.process.returncode == 0, "".join(job.lines)
    job.wait_until_gone()


def test_a_role_answers_sleeps_wakes_and_gets_weights(shared, model):
    job, url = shared
    status, answer = post(f"{url}/rollout/generate", ASK)
    assert (status, answer["meta_info"]["weight_version"]) == (200, "default")
    text = answer["text"]
    assert job.command("sleep", "rollout").returncode == 0
    status, refusal = post(f"{url}/rollout/generate", ASK)
    assert (status, refusal["state"], refusal["role"]) == (503, "sleeping", "rollout")
    assert [engine["state"] for engine in job.engines()] == ["sleeping"], "asking wakes nobody"
    assert job.command("wake", "rollout").returncode == 0
    assert post(f"{url}/rollout/generate", ASK)[1]["text"] == text
    done = job.command("weights", "rollout/student", str(model), "--version", "7")
    assert "1 ready, weights 7" in done.stdout, done.stderr
    assert post(f"{url}/rollout/generate", ASK)[1]["meta_info"]["weight_version"] == "7"
    assert get(f"{url}/rollout/engines")["models"]["student"]["state"] == "ready"


def test_i2_the_gateways_process_computes_nothing(shared):
    job, _ = shared
    maps = Path(f"/proc/{job.pid(' gateway --roles ')}/maps").read_text()
    assert "libtorch" not in maps
    control = Path(f"/proc/{job.process.pid}/maps").read_text()
    assert "libtorch" not in control


def test_the_addresses_of_a_job_are_in_its_status(shared):
    job, url = shared
    told = job.status()
    assert told["gateway_url"] == url
    assert get(f"{told['control_url']}/health") == {"status": "ok"}
    assert told["pid"] == job.process.pid
    assert told["stage"] == "running"
    assert sorted(path.name for path in Path(told["log_directory"]).iterdir()) == [
        "control.log",
        "gateway.log",
        "rollout",
    ]


@pytest.fixture(scope="module")
def pair(tmp_path_factory, model) -> Iterator[tuple[WholeJob, str]]:
    """Of two replicas; whoever of it is killed is there again, until the last test kills it itself."""
    folder = tmp_path_factory.mktemp("pair")
    with whole_job(job_file(folder, model, replicas=2), folder / "cache") as job:
        yield job, job.ready()


@pytest.mark.long
def test_a_killed_gateway_is_there_again_and_goes_on(pair):
    job, url = pair
    text = post(f"{url}/rollout/generate", ASK)[1]["text"]
    os.kill(job.pid(" gateway --roles "), signal.SIGKILL)
    job.until("the gateway has died: it was killed by SIGKILL")
    job.until("the gateway is there again")
    status, answer = post(f"{url}/rollout/generate", ASK)
    while status == 503:  # it has not heard of the role yet
        status, answer = post(f"{url}/rollout/generate", ASK)
    assert (status, answer["text"]) == (200, text)


@pytest.mark.long
def test_a_killed_engine_is_a_new_generation_with_the_same_weights(pair, model):
    job, url = pair
    job.command("weights", "rollout/student", str(model), "--version", "7")
    (first, second) = job.engines()
    port = first["base_url"].rpartition(":")[2]
    os.kill(job.pid(f"--port {port} "), signal.SIGKILL)
    job.until("rollout/student/0: dead: it was killed by SIGKILL")
    status, answer = post(f"{url}/rollout/generate", ASK)
    assert (status, answer["meta_info"]["weight_version"]) == (200, "7"), "by the other one"
    job.until("rollout/student/0: generation 2")
    job.until("rollout/student/0: weights 7")
    job.until("rollout/student/0: ready")
    (again, other) = job.engines()
    assert (again["state"], again["generation"], again["weight_version"]) == ("ready", 2, "7")
    assert other["generation"] == second["generation"]


@pytest.mark.long
def test_nothing_outlives_a_killed_control_process(pair, tmp_path, model):
    job, _ = pair
    assert len(job.processes()) >= 4
    job.process.kill()
    assert job.ended() == -signal.SIGKILL
    job.wait_until_gone()
    done = job.command("status")
    assert done.returncode == 1
    assert "no job is running here" in done.stderr
    with whole_job(job_file(tmp_path, model), job.cache) as again:
        again.ready()


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "status", "times"),
    [
        ("starting default", 130, 1),
        ("the gateway is at", 130, 2),
        ("rollout/student/0: generation 1", 130, 1),
        ("rollout/student/0: generation 1", 130, 2),
        ("default is up", 0, 2),
    ],
)
def test_ctrl_c_at_any_stage_leaves_nothing(tmp_path, model, stage, status, times):
    with whole_job(job_file(tmp_path, model), tmp_path / "cache") as job:
        job.until(stage)
        for _ in range(times):
            job.process.send_signal(signal.SIGINT)
        assert job.ended() == status, "".join(job.lines)
        job.wait_until_gone()
        assert job.lines[-1] == "phalanx: default is down\n"
        assert not any("Traceback" in line for line in job.lines)


@pytest.mark.long
def test_a_second_stop_while_it_drains_ends_it_at_once(tmp_path, model):
    file = job_file(tmp_path, model)
    file.write_text(
        file.read_text().replace("{health_interval_s: 0.5}", "{drain_timeout_s: 86400}")
    )
    with whole_job(file, tmp_path / "cache") as job:
        job.ready()
        os.kill(job.pid(" serve "), signal.SIGSTOP)  # it never comes to rest
        job.process.send_signal(signal.SIGINT)
        job.until("rollout/student/0: draining")
        job.process.send_signal(signal.SIGINT)
        assert job.ended() == 0, "".join(job.lines)
        job.wait_until_gone()


@pytest.mark.long
def test_an_engine_that_cannot_start_is_told_of_and_nothing_stays(tmp_path, model):
    file = job_file(tmp_path, model)
    file.write_text(file.read_text().replace("pool_tokens: 4096", "dtype: float99"))
    with whole_job(file, tmp_path / "cache") as job:
        assert job.ended() == 1
        job.wait_until_gone()
    told = "".join(job.lines)
    assert "student/0" in told
    assert "float99" in told
    assert "Traceback" not in told


@pytest.mark.long
def test_a_detached_job_runs_on_until_it_is_taken_down(tmp_path, model):
    cache = tmp_path / "cache"
    with whole_job(job_file(tmp_path, model), cache, "--detach") as job:
        url = job.ready()
        assert job.ended() == 0
        assert post(f"{url}/rollout/generate", ASK)[0] == 200
        done = job.command("down")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.endswith("phalanx: default is down\n")
        job.wait_until_gone()


@pytest.mark.long
def test_a_detached_start_is_interrupted_as_the_job_is(tmp_path, model):
    with whole_job(job_file(tmp_path, model), tmp_path / "cache", "--detach") as job:
        job.until("rollout/student/0: generation 1")
        job.process.send_signal(signal.SIGINT)
        assert job.ended() == 130
        job.wait_until_gone()


ROUTER = Path(__file__).parents[3] / ".venv-router" / "bin" / "python"
APART = """
gateway: {{http_port: 0}}
launcher: {{router_python: {python}}}
roles:
  rollout:
    models:
      student:
        model: {model}
        route_mode: sglang_router
        groups:
          - {{worker_type: prefill, engine_args: {engine}}}
          - {{worker_type: decode, engine_args: {engine}}}
"""


@pytest.mark.long
@pytest.mark.skipif(
    not ROUTER.exists(), reason="no sglang-router: run `python scripts/peer_env.py router`"
)
def test_i42_prefill_and_decode_are_asked_through_a_router_that_ends_with_the_job(tmp_path, model):
    file = tmp_path / "roles.yaml"
    file.write_text(APART.format(python=ROUTER, model=model, engine=ENGINE))
    with whole_job(file, tmp_path / "cache") as job:
        url = job.ready()
        status, answer = post(f"{url}/rollout/generate", ASK)
        assert (status, answer["meta_info"]["completion_tokens"]) == (200, 4), answer
        told = get(f"{url}/rollout/engines")["models"]["student"]
        router = told["router_url"]
        assert [engine["worker_type"] for engine in told["engines"]] == ["prefill", "decode"]
        assert not any(engine["direct_eligible"] for engine in told["engines"])
        assert get(f"{router}/workers")["total"] == 2
        job.process.kill()
        job.ended()
        job.wait_until_gone()
        with pytest.raises(OSError, match="refused"):
            get(f"{router}/workers")
