"""The roles benchmark: its command, what it leaves out, and whole runs with a tiny model."""

from __future__ import annotations

import signal
import subprocess

import msgspec
import pytest

from phalanx.bench.results import Report
from phalanx.bench.roles_job import EngineSetting
from phalanx.bench.roles_measuring import (
    DYNAMIC,
    MEASURES,
    START,
    STATIC,
    UPDATE,
    RolesWorkload,
    measure_roles,
)
from phalanx.cli.main import main
from phalanx.testing.tiny_llama import write_tiny_llama
from tests.caches import own_cache
from tests.roles.control.whole_job import PHALANX, WholeJob, environment


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Of its own, which tells the processes of a run."""
    return own_cache(tmp_path_factory.mktemp("cache"))


def test_the_command_is_known(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "roles", "--help"])
    assert ended.value.code == 0
    assert "--kv-tokens" in capsys.readouterr().out


def test_a_model_that_is_not_there_is_refused_before_anything_runs(tmp_path, capsys):
    output = tmp_path / "results"
    with pytest.raises(SystemExit) as ended:
        main(["bench", "roles", "--model", "./nowhere", "--output", str(output)])
    assert ended.value.code not in (0, None)
    assert "./nowhere" in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.long
def test_a_whole_run_measures_everything(checkpoint, tmp_path, capsys):
    setting = EngineSetting(checkpoint, "float32", 1, 1024)
    folder = measure_roles(setting, RolesWorkload(2, 8, 2), tmp_path)
    report = msgspec.json.decode((folder / "report.json").read_bytes(), type=Report)
    assert tuple(report.systems) == (STATIC, DYNAMIC)
    for system in report.systems:
        for measure in MEASURES:
            values = report.values(measure.key, system)
            rounds = 1 if measure is START else 2
            # What is frozen takes no update.
            assert len(values) == (0 if (measure, system) == (UPDATE, STATIC) else rounds)
            assert all(value > 0 for value in values), measure.key
    assert {"report.md", "report.png", "report.json", "logs"} == {
        path.name for path in folder.iterdir()
    }
    assert "wake, weights alone" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("stage", ["static is up", "dynamic is up"])
def test_ctrl_c_leaves_no_process(checkpoint, cache, tmp_path, stage):
    sizes = ["--threads", "1", "--kv-tokens", "1024", "--repeats", "1000"]
    where = ["--model", str(checkpoint), "--output", str(tmp_path / "results")]
    with subprocess.Popen(
        [PHALANX, "bench", "roles", *where, *sizes],
        env=environment(cache),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        run = WholeJob(process, cache)
        run.until(stage)
        assert len(run.processes()) > 1
        process.send_signal(signal.SIGINT)
        assert run.ended() != 0
        run.wait_until_gone()
    assert not any("Traceback" in line for line in run.lines), "".join(run.lines)
