"""Jobs that run here are found by their file, as long as their process has its lock."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from phalanx.errors import ConfigurationError
from phalanx.roles.run_file import JobRunsError, NoJobError, RunDirectory, RunRecord


def record(name: str = "job", pid: int = 1) -> RunRecord:
    return RunRecord(
        name=name,
        pid=pid,
        control_url="http://127.0.0.1:1",
        gateway_url="http://127.0.0.1:2",
        config="roles.yaml",
        log_directory="logs",
        started_wall_s=0.0,
        key="secret",
    )


@pytest.fixture
def jobs(tmp_path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def test_a_job_is_found_by_its_name_and_where_it_is_the_only_one(jobs):
    with pytest.raises(NoJobError, match="start one with `phalanx up"):
        jobs.find(None)
    with jobs.claim("one") as file:
        assert jobs.running() == ()
        file.write(record("one"))
        assert jobs.find("one") == jobs.find(None) == record("one")
        assert file.path.stat().st_mode & 0o077 == 0, "it holds a key"
        with pytest.raises(NoJobError, match="no job 'two' is running here; running: one"):
            jobs.find("two")
        with jobs.claim("two") as second:
            second.write(record("two"))
            with pytest.raises(NoJobError, match="one, two; say which one with --name"):
                jobs.find(None)
    assert not file.path.exists()
    with pytest.raises(NoJobError):
        jobs.find("one")


def test_a_name_is_taken_once(jobs):
    with jobs.claim("job") as file:
        with pytest.raises(JobRunsError, match="'job' is starting"), jobs.claim("job"):
            pass
        file.write(record(pid=77))
        with pytest.raises(
            JobRunsError, match=r"\(pid 77\); end it with `phalanx down --name job`"
        ):
            with jobs.claim("job"):
                pass
        assert jobs.find("job").pid == 77
    with jobs.claim("job"):
        pass


@pytest.mark.parametrize("name", ["", "../x", "a b", "-a", "a" * 65])
def test_a_name_that_is_no_file_is_refused(jobs, name):
    with pytest.raises(ConfigurationError, match="job name"), jobs.claim(name):
        pass
    with pytest.raises(ConfigurationError, match="job name"):
        jobs.find(name)


def test_a_file_that_cannot_be_read_is_named(jobs):
    with jobs.claim("job") as file:
        file.path.write_text("{")
        with pytest.raises(ConfigurationError, match=r"cannot read .*job\.json"):
            jobs.find("job")


HOLDER = """
import sys
from pathlib import Path
from phalanx.roles.run_file import RunDirectory, RunRecord
with RunDirectory(Path(sys.argv[1])).claim("job") as file:
    file.write(RunRecord(name="job", pid=1, control_url="", gateway_url="", config="",
        log_directory="", started_wall_s=0.0))
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_killed_process_leaves_a_file_that_means_nothing(tmp_path):
    folder = tmp_path / "run"
    jobs = RunDirectory(folder)
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        assert jobs.find("job").name == "job"
        waiting = threading.Thread(target=jobs.wait_for_end, args=("job",))
        waiting.start()
        assert waiting.is_alive()
        process.send_signal(signal.SIGKILL)
        waiting.join()
    assert Path(folder, "job.json").exists()
    with pytest.raises(NoJobError):
        jobs.find("job")
    with jobs.claim("job"):
        assert not Path(folder, "job.json").exists()


def test_logs_of_the_job_before_are_kept_apart(jobs):
    with jobs.claim("job"):
        for number in range(3):
            directory = jobs.fresh_log_directory("job")
            assert not list(directory.iterdir())
            (directory / f"{number}.log").touch()
        old = directory.with_name("job.logs.old")
        assert [path.name for path in old.iterdir()] == ["1.log"]


def test_nobody_is_waited_for_where_there_was_no_job(jobs):
    jobs.wait_for_end("never")


def test_d7_a_job_begins_when_nothing_is_left_of_the_one_before(tmp_path):
    runs = RunDirectory(tmp_path)
    order = []
    with runs.claim("j") as file:
        assert file.living is not None
        kept = os.dup(file.living)  # as by whoever ends the job's processes after its death

    def claim() -> None:
        with runs.claim("j"):
            order.append("claimed")

    with ThreadPoolExecutor(1) as pool:
        claiming = pool.submit(claim)
        lock = tmp_path / "j.lock"
        with lock.open("r") as other:
            while _taken_by_me(other.fileno()) and not claiming.done():
                pass
        order.append("gone")
        os.close(kept)
        claiming.result()
    assert order == ["gone", "claimed"]


def _taken_by_me(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(lock, fcntl.LOCK_UN)
    return True


def test_jobs_of_the_default_name_have_a_journal_for_each_file(tmp_path, monkeypatch):
    jobs = RunDirectory(tmp_path / "run")
    monkeypatch.chdir(tmp_path)

    def journal(name: str, config: str) -> Path:
        with jobs.claim(name, config) as file:
            return file.journal

    mine = journal("default", f"{tmp_path}/a.yaml")
    assert journal("default", "a.yaml") == journal("default", "./a.yaml") == mine
    assert journal("default", "b.yaml") != mine
    assert mine.parent == tmp_path / "run"
    assert journal("mine", "a.yaml") == journal("mine", "b.yaml") == mine.parent / "mine.journal"
    with pytest.raises(ConfigurationError, match="job name"), jobs.claim(mine.stem):
        pass
