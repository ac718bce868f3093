"""The commands that ask a running job, on a job of fake engines in another thread."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest

from phalanx.cli.control_client import ControlClient, find_job
from phalanx.cli.main import main
from phalanx.cli.roles import JobAddress
from phalanx.errors import RoleOperationFailedError, RoleOperationRefusedError
from phalanx.testing.role_faults import Fault
from tests.cli.scripted_server import ScriptedServer
from tests.roles.control.jobs import FILE, FakeJob, fake_job
from tests.roles.control.whole_job import PHALANX, environment

TEXT = FILE.replace(
    "genrm: {", "genrm: {deployment: {offload_timeout_s: 0.2, drain_timeout_s: 0.2}, "
)


@contextmanager
def running_job(folder: Path, text: str = TEXT, name: str = "job") -> Iterator[FakeJob]:
    """A job that runs until the end of this, or until it is told to end."""
    started: Future[FakeJob] = Future()

    async def scenario() -> None:
        async with fake_job(folder, text, name) as job:
            await job.process.start()
            started.set_result(job)
            await job.process.wait()

    def body() -> None:
        try:
            asyncio.run(scenario())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=body)
    thread.start()
    try:
        job = started.result()
        try:
            yield job
        finally:
            job.end()
    finally:
        thread.join()


@pytest.fixture
def job(tmp_path, monkeypatch) -> Iterator[FakeJob]:
    monkeypatch.setenv("PHALANX_CACHE_DIR", str(tmp_path))
    with running_job(tmp_path) as job:
        yield job


def states(run, role: str) -> list[str]:
    code, out, _ = run("status", "--json")
    assert code == 0
    (found,) = [each for each in json.loads(out)["roles"] if each["document"]["role"] == role]
    models = found["document"]["models"].values()
    return [engine["state"] for model in models for engine in model["engines"]]


def test_the_status_is_a_table_or_json(job, run):
    code, out, _ = run("status")
    assert code == 0
    assert out.startswith("job: http://127.0.0.1:")
    assert re.search(r"^rollout +student/0 +ready +1 +default +all ", out, re.MULTILINE)
    assert re.search(r"^genrm +judge/0 +ready +1 ", out, re.MULTILINE)
    code, out, _ = run("status", "--json")
    told = json.loads(out)
    assert (told["name"], told["stage"]) == ("job", "running")
    assert states(run, "rollout") == ["ready", "ready"]


def test_the_status_has_whole_lines_where_it_is_no_terminal(job, run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    job.in_its_loop(lambda: job.world.faults.always("resident", Fault.UNSENT))
    job.world.faults.next("release", [Fault.UNANSWERED])
    assert run("sleep", "genrm")[0] == 1
    (below,) = [line for line in run("status")[1].splitlines() if "could not be put" in line]
    assert len(below) > 60


def test_a_role_is_drained_put_to_sleep_and_woken(job, run):
    code, out, err = run("drain", "rollout")
    assert (code, err) == (0, "")
    assert out.startswith("rollout/student: 2 draining")
    code, out, _ = run("sleep", "rollout")
    assert out.startswith("rollout/student: 2 sleeping")
    assert states(run, "genrm") == ["ready"]
    code, out, _ = run("wake", "rollout", "--tags", "weights,kv_cache")
    assert code == 0
    assert "ready" not in out
    code, out, _ = run("wake", "rollout")
    assert out.startswith("rollout/student: 2 ready")


def test_a_wake_that_brings_no_replica_says_so(run, tmp_path, monkeypatch):
    monkeypatch.setenv("PHALANX_CACHE_DIR", str(tmp_path))
    with running_job(tmp_path, TEXT.replace("{offload", "{start_asleep: true, offload")):
        code, out, _ = run("wake", "genrm", "--tags", "weights")
        assert code == 1
        assert "genrm/judge: sleeping, has no replicas: `phalanx wake genrm` without" in out
        assert run("wake", "genrm")[0] == 0
        assert run("scale", "rollout/student", "0")[0] == 0
        code, out, _ = run("wake", "rollout")
        assert code == 1
        assert "has no replicas" in out
        assert "`phalanx scale rollout/student N` adds some" in out


def test_ctrl_c_at_an_operation_says_that_it_goes_on(job, tmp_path):
    request = job.in_its_loop(lambda: job.world.engine("student/0").send(3600.0))
    ours, terminal = os.openpty()
    process = subprocess.Popen(
        [PHALANX, "drain", "rollout"],
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=terminal,
        text=True,
    )
    client, details = ControlClient(job.process.control_url, None), [""]
    while "drain" not in details:
        details = [event.detail for event in client.events(0, 0.0)]
    with os.fdopen(os.dup(ours)) as told:
        lines = [told.readline().strip() for _ in range(2)]
    assert lines == [
        "phalanx: waiting until running requests of rollout have ended; it goes on after Ctrl-C",
        "phalanx: rollout/student/0 waits until 1 request ends",
    ]
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate()
    assert (process.returncode, out) == (130, "")
    os.close(terminal)
    assert os.read(ours, 4096).decode() == (
        "phalanx: not waited for: role 'rollout' goes on with it, see `phalanx status`\r\n"
    )
    os.close(ours)
    assert not request.ended
    client.stop(now=True)


def test_a_model_is_scaled_and_gets_weights(job, run, tmp_path):
    code, out, _ = run("scale", "rollout/student", "3")
    assert (code, out.split(" (")[0]) == (0, "rollout/student: 3 ready, weights default")
    code, out, _ = run("weights", "rollout/student", str(tmp_path), "--version", "7")
    assert (code, out.split(" (")[0]) == (0, "rollout/student: 3 ready, weights 7")
    assert f"load_weights 7 {tmp_path}" in job.world.engine("student/2").log


def test_what_an_operation_ended_with_is_told_by_its_class(job):
    client = find_job(JobAddress(None, None, None))
    job.world.faults.next("release", [Fault.UNANSWERED])
    job.world.faults.always("resident", Fault.UNSENT)
    with pytest.raises(RoleOperationFailedError, match="judge/0"):
        client.ask("genrm", "deactivate", {})
    job.world.faults.stop()
    with pytest.raises(RoleOperationRefusedError, match="blocked"):
        client.ask("genrm", "activate", {})


def test_a_dead_replica_is_recovered_and_a_blocked_one_unblocked(job, run):
    code, _, err = run("recover", "rollout/student/0")
    assert code == 1
    assert "student/0 serves" in err
    job.world.faults.next("release", [Fault.UNANSWERED])
    job.world.faults.always("resident", Fault.UNSENT)
    code, _, err = run("sleep", "genrm")
    assert code == 1
    code, out, _ = run("status")
    assert re.search(r"judge/0 +blocked .* unknown", out)
    job.world.faults.stop()
    code, out, err = run("unblock", "genrm/judge/0")
    assert (code, err) == (0, "")
    code, out, err = run("unblock", "genrm/judge/0", "--holds", "none")
    assert (code, err) == (0, "")
    code, out, err = run("sleep", "genrm")
    assert (code, err) == (0, "")
    assert out.startswith("genrm/judge: 1 sleeping")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("drain judge", 2, "there is no role 'judge'; roles: rollout, genrm"),
        ("scale rollout/x 2", 2, "role 'rollout' has no model 'x'; models: student"),
        ("scale rollout/student -- -1", 2, "replicas"),
        ("weights genrm/judge /tmp --version 7", 2, "static"),
        ("weights rollout/student /no/such/dir --version 7", 2, "/no/such/dir"),
        ("weights rollout/student /tmp", 2, "give the weights a name with --version"),
        ("recover rollout/student/9", 2, "student/9"),
        ("wake rollout --tags none", 2, "tag 'none' is not known; allowed: weights"),
        ("wake rollout --tags weigths", 2, "tag 'weigths' is not known; allowed: weights"),
        ("scale rollout 2", 2, "'rollout' must be ROLE/MODEL, as rollout/student"),
        ("recover rollout/student", 2, "must be ROLE/MODEL/N, as rollout/student/0"),
        ("status --watch --json", 2, "--watch and --json are both given"),
        ("status --name x", 1, "no job 'x' is running here; running: job"),
        ("status --name x --control http://h:1", 2, "give one"),
        ("status --control h:x", 2, "is not the address of a server"),
    ],
)
def test_mistakes_are_one_line(job, run, words, code, says):
    given, out, err = run(*words.split())
    assert (given, out) == (code, "")
    assert says in err
    assert err.startswith("phalanx: ")
    assert err.count("\n") == 1


def test_without_a_job_everything_says_so(run, tmp_path, monkeypatch):
    monkeypatch.setenv("PHALANX_CACHE_DIR", str(tmp_path))
    for words in ("status", "drain r", "down", "scale r/m 1", "status --watch"):
        code, out, err = run(*words.split())
        assert (code, out) == (1, "")
        assert "no job is running here; start one with `phalanx up roles.yaml`" in err


def test_an_address_that_does_not_answer_or_is_no_control_process_is_named(job, run):
    code, _, err = run("status", "--control", "http://127.0.0.1:1")
    assert code == 1
    assert "the control process at http://127.0.0.1:1 does not answer: Connection refused" in err
    code, _, err = run("status", "--control", job.process.gateway_url)
    assert code in (1, 2)
    refusal = {"error": {"code": "no_server", "message": "no HTTP server is registered"}}
    with ScriptedServer((503, refusal)).running() as gateway:
        code, _, err = run("status", "--control", gateway.url)
    assert code == 2
    assert "is no control process of `phalanx up`: it answers 503; give the job's --name" in err


def test_down_ends_the_job_and_says_what_happens(job, run):
    code, out, err = run("down")
    assert (code, err) == (0, "")
    assert "stopping: running requests end first" in out
    assert out.endswith("phalanx: job is down\n")
    assert job.world.running == ()
    assert run("status")[0] == 1


def test_down_now_waits_for_no_request(job, run):
    request = job.in_its_loop(lambda: job.world.engine("student/0").send(3600.0))
    code, out, _ = run("down", "--now")
    assert code == 0
    assert request.ended == "lost"


def test_a_key_is_found_in_the_run_file_and_asked_for_elsewhere(run, tmp_path, monkeypatch):
    monkeypatch.setenv("PHALANX_CACHE_DIR", str(tmp_path))
    with running_job(tmp_path, f"control: {{key: secret}}\n{TEXT}") as job:
        assert run("status")[0] == 0
        url = job.process.control_url
        code, _, err = run("status", "--control", url)
        assert code == 2
        assert "give it with --key" in err
        assert run("status", "--control", url, "--key", "secret")[0] == 0


def test_up_refuses_a_second_job_of_the_same_name(job, tmp_path, run):
    file = tmp_path / "r.yaml"
    file.write_text("roles: {rollout: {models: {a: {engine: external, urls: ['http://h:1']}}}}")
    code, out, err = run("up", str(file), "--name", "job")
    assert (code, out) == (2, "")
    assert "the job 'job' is running (pid " in err
    assert "end it with `phalanx down --name job`" in err


def test_two_jobs_are_told_apart_by_their_names(job, run, tmp_path):
    with running_job(tmp_path, name="other"):
        code, _, err = run("status")
        assert code == 1
        assert "several jobs are running: job, other; say which one with --name" in err
        assert run("status", "--name", "other")[1].startswith("other: ")


class Told(io.StringIO):
    """What is printed; `begun` is set with the first of it."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()

    def write(self, text: str) -> int:
        self.begun.set()
        return super().write(text)


def test_watch_shows_changes_until_the_job_ends(job, monkeypatch):
    out, err, shown = Told(), Told(), Future()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)

    def watch() -> None:
        try:
            main(["status", "--watch"])
        except BaseException as ended:
            shown.set_result(ended)
            out.begun.set()

    watching = threading.Thread(target=watch)
    watching.start()
    out.begun.wait()
    job.end()
    watching.join()
    assert isinstance(ended := shown.result(), SystemExit)
    assert ended.code == 0
    assert "student/0" in out.getvalue()
    assert "has ended" in out.getvalue() + err.getvalue()
