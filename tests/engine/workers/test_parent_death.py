"""However the parent of workers ends, no worker outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.workers.supervised import await_death, is_alive

ROOT = Path(__file__).parents[3]
PHASES = [
    "spawning",
    "hello",
    "loading",
    "ready",
    "receiving",
    "executing",
    "replying",
    "stopping",
]


@pytest.fixture
def parent(pipe):
    """Starts a parent; with it come the announce pipes of its two workers."""
    processes = []

    def parent(what, how, *more, env=None):
        pipes = [pipe("worker0"), pipe("worker1")]
        command = [sys.executable, "-m", "tests.engine.workers.parent", what, how]
        process = subprocess.Popen(
            [*command, *(each.path for each in pipes), *more],
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        return process, pipes

    yield parent
    for process in processes:
        process.kill()
        process.communicate()


def spawning_environment(tmp_path, announces, gate):
    """Keeps each new worker at a gate before the first line of ours runs in it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, select, sys\n"
        "if 'phalanx.engine.workers.process' in ' '.join(sys.orig_argv):\n"
        f"    for announce in {announces!r}:\n"
        "        try:\n"
        "            os.rename(announce, announce + '.taken')\n"
        "        except FileNotFoundError:\n"
        "            continue\n"
        f"        gate = os.open({gate!r}, os.O_RDONLY | os.O_NONBLOCK)\n"
        "        os.write(os.open(announce + '.taken', os.O_WRONLY), b'%d\\n' % os.getpid())\n"
        "        opened = select.poll()\n"
        "        opened.register(gate, select.POLLIN)\n"
        "        opened.poll()\n"
        "        break\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}


@pytest.mark.parametrize(
    "phase", [pytest.param(p, marks=() if p == "executing" else pytest.mark.long) for p in PHASES]
)
def test_s10_workers_die_with_a_parent_that_is_killed(parent, phase, gate, tmp_path):
    announces = [str(tmp_path / f"worker{number}") for number in range(2)]
    env = spawning_environment(tmp_path, announces, gate.path) if phase == "spawning" else None
    process, pipes = parent("hold", phase, gate.path, env=env)
    pids = [each.pid() for each in pipes]
    assert all(is_alive(pid) for pid in pids)
    process.kill()
    process.wait()
    if phase == "spawning":
        # It cannot have asked to die with its parent yet: it finds out as soon as it runs.
        gate.open()
    for each in pipes:
        each.await_end()


@pytest.mark.long
def test_s10_a_worker_that_begins_late_does_not_need_its_connection_to_know(parent, gate, tmp_path):
    """A forked copy of the parent keeps the connection open, so that it never ends."""
    announces = [str(tmp_path / f"worker{number}") for number in range(2)]
    env = spawning_environment(tmp_path, announces, gate.path)
    process, pipes = parent("hold", "copied", gate.path, env=env)
    for each in pipes:
        each.pid()
    assert process.stdout.readline() == "copied\n"
    process.kill()
    process.wait()
    gate.open()
    for each in pipes:
        each.await_end()


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "status", "orderly"),
    [("return", 0, True), ("raise", 1, True), ("exit", 5, True), ("os._exit", 6, False)],
)
def test_s10_workers_end_with_a_parent_that_forgets_them(parent, how, status, orderly):
    process, pipes = parent("leave", how)
    pids = [int(pid) for pid in process.stdout.readline().split()]
    if orderly:
        assert [each.pid() for each in pipes] == pids  # told to leave
    for pid in pids:
        await_death(pid)
    _, printed = process.communicate()
    assert process.returncode == status
    if how == "raise":
        assert printed.endswith("RuntimeError: as asked\n") and printed.count("Traceback") == 1
    else:
        assert printed == ""


@pytest.mark.long
def test_a_forked_copy_of_the_parent_leaves_the_workers_alone(parent):
    process, _ = parent("leave", "fork")
    process.stdout.readline()
    assert process.communicate() == ("running\n", "") and process.returncode == 0


@pytest.mark.long
def test_ctrl_c_in_the_terminal_leaves_the_choice_to_the_parent(parent):
    process, pipes = parent("leave", "interrupt")
    process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)
    for each in pipes:
        each.pid()  # told to leave, and not ended by the signal
    assert process.communicate() == ("stopped None\n", "")
