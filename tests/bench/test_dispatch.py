"""The dispatch benchmark: flags, goals, its transports, and a whole run with tiny counts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from phalanx.bench.dispatch import dispatch
from phalanx.bench.dispatch_goals import goals
from phalanx.bench.dispatch_systems import FLOOR, PEERS, PHALANX, REPLICAS
from phalanx.bench.dispatch_workload import PARTS, DispatchWorkload, payloads
from phalanx.bench.dispatching import measure_dispatch
from phalanx.bench.results import Measure, Report, Sample
from phalanx.bench.systems import WORKERS, environment
from phalanx.bench.worker_process import WorkerProcess
from phalanx.cli.main import main
from phalanx.errors import ConfigurationError, MissingDependencyError, RequestFailedError

PYTHON = Path(sys.executable)
SMALL = {"num_images": 1, "state_elements": 30_000, "reply_elements": 16}
TINY = DispatchWorkload(
    payloads=payloads(20, 10, 2),
    workers=(1,),
    in_flight=(1, 4),
    repeats=2,
    num_steps=3,
    step_s=0.001,
    num_beside=5,
    beside_rounds=2,
    num_waiting=20,
    num_deaths=1,
    num_pending=8,
    num_tiny=200,
    tiny_chunk=100,
)


@pytest.fixture
def start(tmp_path):
    """Starts a system's process; it and all its children have ended when the test has."""
    started = []

    def begin(system, workers=1):
        command = [str(PYTHON), str(WORKERS / system.worker)]
        log = tmp_path / f"{system.name}.log"
        worker = WorkerProcess(system.name, command, environment(system, PYTHON, 1), log)
        started.append(worker)
        worker.ask("start", workers=workers, scratch=str(tmp_path))
        return worker

    yield begin
    for worker in started:
        worker.close()


def children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def test_what_is_unknown_or_not_installed_is_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingDependencyError) as error:
        dispatch(against="zmq")
    for command in PEERS["zmq"].install:
        assert command in str(error.value)
    with pytest.raises(ConfigurationError, match="--against: 'celery' is not known"):
        dispatch(against="celery")
    with pytest.raises(ConfigurationError, match="--only: 'speed' is not known; .*round-trips"):
        dispatch(only="speed")
    with pytest.raises(ConfigurationError, match="nothing to measure"):
        dispatch(only="")
    with pytest.raises(ConfigurationError, match="--in-flight"):
        dispatch(in_flight="many")
    with pytest.raises(ConfigurationError, match="--workers needs positive numbers"):
        dispatch(workers="0")
    assert list(tmp_path.iterdir()) == []


def test_the_sizes_are_what_they_are_called():
    sizes = {payload.label: payload.num_bytes for payload in payloads(1, 1, 1)}
    assert sizes == {"1 KB": 1000, "600 KB": 600_000, "8 MB": 8_000_000}
    assert [4 * payload.reply_elements for payload in payloads(1, 1, 1)] == [1000, 6400, 6400]
    quick, whole = DispatchWorkload.quick(), DispatchWorkload()
    assert quick.num_tiny * 10 == whole.num_tiny == 100_000


def report(**values: float | dict[str, float]) -> Report:
    """Of one round; a number is Phalanx's, others are given by system."""
    by_system = {
        key: value if isinstance(value, dict) else {"phalanx": value}
        for key, value in values.items()
    }
    return Report(
        name="dispatch",
        started="2030-01-01 00:00 UTC",
        context={},
        systems={"phalanx": "", "zmq": "", "floor": ""},
        measures=tuple(Measure(key=key, label=key, unit="us") for key in values),
        samples=tuple(
            Sample(measure=key, system=system, repeat=0, value=value)
            for key, of_systems in by_system.items()
            for system, value in of_systems.items()
        ),
    )


@pytest.mark.parametrize(
    ("words", "met", "missed"),
    [
        ("1KB round trip", {"1kb_1w_1_p50": 100}, {"1kb_1w_1_p50": 101}),
        ("600KB round trip, p50 at most 150", {"600kb_1w_1_p50": 150}, {"600kb_1w_1_p50": 151}),
        (
            "of zmq",
            {"600kb_1w_1_p50": {"phalanx": 60, "zmq": 100}},
            {"600kb_1w_1_p50": {"phalanx": 61, "zmq": 100}},
        ),
        (
            "two plain copies",
            {"8mb_1w_1_p50": 400, "copies_8mb": {"floor": 100}, "handovers_8mb": {"floor": 300}},
            {"8mb_1w_1_p50": 401, "copies_8mb": {"floor": 100}, "handovers_8mb": {"floor": 300}},
        ),
        ("8,000 requests/s", {"600kb_1w_8_rate": 8000}, {"600kb_1w_8_rate": 7999}),
        (
            "two replicas",
            {"steps_1": 50, "steps_2": {"phalanx": 93, "floor": 99}},
            {"steps_1": 50, "steps_2": {"phalanx": 92, "floor": 99}},
        ),
        (
            "two replicas",
            {"steps_1": 50, "steps_2": {"phalanx": 60, "floor": 61}},
            {"steps_1": 50, "steps_2": {"phalanx": 60, "floor": 62}},
        ),
        (
            "stopped",
            {
                "beside_busy_submit_p10": 20,
                "beside_stopped_submit_p10": 22,
                "beside_busy_round_trip_p50": 80,
                "beside_stopped_round_trip_p50": 40,
            },
            {
                "beside_busy_submit_p10": 20,
                "beside_stopped_submit_p10": 22.1,
                "beside_busy_round_trip_p50": 80,
                "beside_stopped_round_trip_p50": 80,
            },
        ),
        ("death", {"death": 50}, {"death": 50.1}),
        (
            "grow",
            {"parent_growth": 1024, "worker_growth": -5},
            {"parent_growth": 0, "worker_growth": 1025},
        ),
    ],
)
def test_each_goal_is_met_up_to_its_limit(words, met, missed):
    for values, verdict in ((met, True), (missed, False)):
        (goal,) = (goal for goal in goals(report(**values)) if words in goal.aim)
        assert goal.met is verdict and goal.result


def test_goals_without_figures_are_left_out():
    assert goals(report()) == ()


@pytest.mark.parametrize("name", ["queue", pytest.param("pool", marks=pytest.mark.long)])
def test_a_transport_answers_each_observation_and_leaves_no_process(start, name):
    worker = start(PEERS[name], workers=2)
    worker.ask("check", count=6, **SMALL)
    answer = worker.ask("round_trips", count=9, in_flight=4, **SMALL)
    assert len(answer["times_s"]) == 9 and answer["seconds"] > 0
    (process,) = (
        each for each in children(os.getpid()) if PEERS[name].worker in each.cmdline()[-1]
    )
    family = [process, *children(process.pid)]
    assert len(family) >= 3
    worker.close()
    assert psutil.wait_procs(family)[1] == []


SCRIPTED = """
import json
from pathlib import Path
import numpy as np
from dispatch_protocol import serve

class Scripted:
    def __init__(self, message):
        self.folder, self.on_their_way, self.seen = Path(message["scratch"]), 0, []
    def describe(self):
        return "answers zeros, and notes how many are on their way when one is awaited"
    def submit(self, observation):
        self.on_their_way += 1
        return observation["reply_elements"]
    def result(self, pending):
        self.seen.append(self.on_their_way)
        self.on_their_way -= 1
        return np.zeros(pending, np.float32)
    def close(self):
        (self.folder / "seen").write_text(json.dumps(self.seen))

serve(Scripted)
"""


@pytest.fixture
def scripted(tmp_path):
    script = tmp_path / "scripted.py"
    script.write_text(SCRIPTED)
    variables = {**environment(PHALANX, PYTHON, 1), "PYTHONPATH": str(WORKERS)}
    command, log = [str(PYTHON), str(script)], tmp_path / "scripted.log"
    with WorkerProcess("scripted", command, variables, log) as worker:
        worker.ask("start", scratch=str(tmp_path))
        yield worker


def test_a_wrong_answer_is_noticed(scripted):
    with pytest.raises(RequestFailedError, match="observation 1 was answered with"):
        scripted.ask("check", count=2, **SMALL)


def test_the_closed_loop_keeps_as_many_in_flight_as_it_is_told(scripted, tmp_path):
    scripted.ask("round_trips", count=6, in_flight=3, **SMALL)
    scripted.close()
    assert json.loads((tmp_path / "seen").read_text()) == [3, 3, 3, 3, 2, 1]


@pytest.mark.long
def test_a_whole_run_measures_every_part_and_says_which_goals_are_met(tmp_path, capsys):
    queue = PEERS["queue"], PYTHON
    folder = measure_dispatch([queue], TINY, PARTS, tmp_path / "results")

    raw = json.loads((folder / "report.json").read_text())
    assert list(raw["systems"]) == ["phalanx", "queue", "floor"]
    values = {(each["measure"], each["system"]) for each in raw["samples"]}
    for system in ("phalanx", "queue"):
        for payload in ("1kb", "600kb", "8mb"):
            for value in ("1_p50", "1_p99", "1_rate", "1_cpu", "4_p50", "4_p99", "4_rate"):
                assert (f"{payload}_1w_{value}", system) in values
    assert {system for measure, system in values if measure == "steps_2"} == {"phalanx", "floor"}
    assert ("ping_pong", "floor") in values and {
        ("copies_600kb", "floor"),
        ("handovers_600kb", "floor"),
    } <= values
    order = [each["system"] for each in raw["samples"] if each["measure"] == "1kb_1w_4_rate"]
    assert order == ["phalanx", "queue"] * 2

    aims = "".join(goal["aim"] for goal in raw["goals"])
    for words in ("1KB", "600KB", "8MB", "two replicas", "stopped", "death", "grow"):
        assert words in aims
    printed = capsys.readouterr().out
    assert "met    " in printed or "missed " in printed
    assert "600 KB, 1 worker, 4 in flight" in printed
    assert "| goal | this run |" in (folder / "report.md").read_text()
    assert not [
        each
        for each in children(os.getpid())
        if any(system.worker in " ".join(each.cmdline()) for system in (PHALANX, FLOOR, REPLICAS))
    ]


FAKE_PYTHON = """#!/bin/sh
case "$1" in -c) exit 0;; esac
echo started > {fifo}
exec tail -f /dev/null
"""


@pytest.mark.long
def test_ctrl_c_in_the_middle_ends_every_process(tmp_path):
    """The peer that is interrupted never answers; Phalanx's workers run by then."""
    fifo, python = tmp_path / "fifo", tmp_path / "python"
    os.mkfifo(fifo)
    python.write_text(FAKE_PYTHON.format(fifo=fifo))
    python.chmod(0o755)
    program = "from phalanx.cli.main import main; main()"
    flags = ["--only", "round-trips", "--workers", "1", "--against", "zmq"]
    flags += ["--peer-python", f"zmq={python}", "--output", str(tmp_path / "results")]
    process = subprocess.Popen(
        [str(PYTHON), "-c", program, "bench", "dispatch", *flags], stdout=subprocess.DEVNULL
    )
    fifo.read_text()
    family = children(process.pid)
    assert any("phalanx.engine.workers" in " ".join(each.cmdline()) for each in family)
    process.send_signal(signal.SIGINT)
    assert process.wait() != 0
    assert psutil.wait_procs(family)[1] == []
    (results,) = (tmp_path / "results").iterdir()
    assert not (results / "report.json").exists()


def test_the_command_is_there(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "dispatch", "--help"])
    assert "--in-flight" in capsys.readouterr().out
