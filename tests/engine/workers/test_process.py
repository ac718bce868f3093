"""What a worker's process is like, from its first line to its last."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.engine.workers.lifecycle import LifecycleState
from phalanx.engine.workers.runtime import WorkerFactorySpec
from phalanx.errors import ConfigurationError, EngineUnavailableError
from phalanx.testing.worker_runtimes import Deed, Misdeed, Phase
from tests.engine.workers.runtimes import factory
from tests.engine.workers.supervised import in_background

ROOT = Path(__file__).parents[3]


def test_s8_a_worker_is_a_fresh_interpreter_that_loads_no_torch(build):
    (ready,) = build(factory=factory("observing")).start()
    assert ready.metadata == {
        "has_torch": 0,
        "stdin": "/dev/null",
        "main": "__main__",
        "argv": " ".join(sys.argv),
        "cwd": os.getcwd(),
    }


def test_what_a_plugin_prints_passes_through(build, capfd):
    supervisor = build(factory=factory("Printing"))
    supervisor.start()
    supervisor.close()
    printed = capfd.readouterr()
    assert printed.out == "out while loading\nout while stopping\n"
    assert printed.err == "err while loading\n"


def test_what_a_plugin_printed_before_it_failed_is_not_lost(build, capfd, tmp_path):
    (tmp_path / "noisy.py").write_text(
        "import threading\n"
        "def load(config):\n"
        "    print('last words')\n"
        "    threading.Thread(target=threading.Event().wait).start()  # so it has to be killed\n"
        "    1 / 0\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        patch.delenv("PYTHONUNBUFFERED", raising=False)
        supervisor = build(factory=lambda placement: WorkerFactorySpec("noisy:load", None))
        with pytest.raises(EngineUnavailableError, match="ZeroDivisionError"):
            supervisor.start()
    assert capfd.readouterr().out == "last words\n"


@pytest.mark.long
def test_r53_variables_of_the_parent_are_inherited_and_a_pinned_device_wins(build, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("PHALANX_DEVICE", "cuda:7")
    names = ("CUDA_VISIBLE_DEVICES", "PHALANX_DEVICE", "LOCAL_WORLD_SIZE")
    (ready,) = build(report=names).start()
    found = {name: ready.metadata[name] for name in names}
    assert found == {
        "CUDA_VISIBLE_DEVICES": "4,5",
        "PHALANX_DEVICE": "cpu",
        "LOCAL_WORLD_SIZE": "",
    }


def test_r53_s8_a_worker_has_its_environment_from_its_first_instruction(build):
    """As its interpreter and its dynamic loader need it."""
    names = ("PHALANX_DEVICE", "OMP_NUM_THREADS")
    supervisor = build(
        factory=factory("environment_of_birth", names),
        extra_env=(("PYTHONHASHSEED", "0"), ("OMP_NUM_THREADS", "3")),
    )
    (ready,) = supervisor.start()
    assert ready.metadata == {
        "hash_randomization": 0,
        "PHALANX_DEVICE": "cpu",
        "OMP_NUM_THREADS": "3",
    }


@pytest.mark.long
def test_r54_on_cuda_each_worker_is_given_its_own_device(build):
    supervisor = build(report=("PHALANX_DEVICE",), shape={"replicas": 2}, target="cuda:0")
    devices = [each.metadata["PHALANX_DEVICE"] for each in supervisor.start()]
    assert devices == ["cuda:0", "cuda:1"]


@pytest.mark.long
def test_ctrl_c_does_not_end_a_worker(started, listener):
    supervisor = started()
    os.kill(supervisor.pids[0], signal.SIGINT)
    supervisor.submit(0, 1, "a", "b")
    assert listener.answers(1) == {1: "b"}


def test_a_large_configuration_does_not_hold_up_the_start_of_the_others(build):
    """More than a pipe takes, to workers that have not begun to read."""
    supervisor = build(factory=factory("config_size", bytes(5_000_000)), shape={"replicas": 2})
    assert [each.metadata["size"] for each in supervisor.start()] == [5_000_000] * 2


@pytest.mark.long
def test_a_workers_title_names_its_replica_and_its_ranks(build, monkeypatch, tmp_path):
    (tmp_path / "setproctitle.py").write_text(
        "import os\n"
        "def setproctitle(title):\n"
        "    open(os.path.join(os.path.dirname(__file__), 'titles'), 'a').write(title + '\\n')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    build(shape={"replicas": 2, "ranks": 2}).start()
    titles = sorted((tmp_path / "titles").read_text().splitlines())
    ranks = "_DENSE_TP1_ATTENTION_TP1_MOE_TP1_MOE_TP_EP1"
    assert titles == [
        "phalanx::worker_R0",
        "phalanx::worker_R0" + ranks,
        "phalanx::worker_R1",
        "phalanx::worker_R1" + ranks,
    ]


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("long_error", ["ValueError: xxx", "\\udc80 the end"]),
        ("leaving", ["failed while loading: SystemExit: plugins may try this"]),
        ("unprintable", ["Unprintable: <exception str() failed>"]),
        ("missing", ["AttributeError", "has no attribute 'missing'"]),
    ],
)
def test_whatever_a_plugin_raises_is_told(build, name, texts):
    with pytest.raises(EngineUnavailableError) as caught:
        build(factory=factory(name)).start()
    text = str(caught.value)
    assert len(text) < 60_000 and all(each in text for each in texts)


def test_a_thread_that_never_ends_is_a_worker_that_does_not_stop(build):
    supervisor = build(factory=factory("threaded"), shutdown_timeout_s=0.1)
    supervisor.start()
    supervisor.close()
    assert supervisor.state is LifecycleState.FAILED
    assert "did not stop within shutdown_timeout_s=0.1" in str(supervisor.failure)


@pytest.mark.long
def test_a_worker_told_to_die_dies_with_its_group_only(started, listener, pipe, gate):
    """The kernel's promise holds for the group's own thread, whoever starts and submits."""
    executing = pipe()
    supervisor = started()
    misdeed = Misdeed(Phase.EXECUTING, Deed.WAIT, announce=executing.path, gate=gate.path)
    in_background(lambda: supervisor.submit(0, 1, "a", misdeed)).result()
    executing.pid()
    gate.open()
    assert listener.answers(1) == {1: misdeed}


SCRIPT = """
import sys
from dataclasses import dataclass
sys.path.insert(0, {root!r})
from phalanx.engine.workers.runtime import WorkerFactorySpec
from tests.engine.workers.runtimes import Idle
from tests.engine.workers.supervised import supervise

@dataclass
class Args:
    name: str

def load(args):
    return Idle({{"name": args.name, "main": __name__}})

def start():
    spec = WorkerFactorySpec("__main__:load", Args("mine"))
    supervisor = supervise(factory=lambda placement: spec)
    ready, = supervisor.start()
    print(ready.metadata)
    supervisor.close()

{last_lines}
"""


def run_script(tmp_path, last_lines):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(root=str(ROOT), last_lines=last_lines))
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True)


@pytest.mark.long
def test_r34_a_plugin_of_the_main_module_works(tmp_path):
    ended = run_script(tmp_path, "if __name__ == '__main__':\n    start()")
    assert (ended.stdout, ended.stderr) == ("{'name': 'mine', 'main': '__mp_main__'}\n", "")


@pytest.mark.long
def test_r34_a_main_module_without_a_guard_is_told_what_to_do(tmp_path):
    ended = run_script(tmp_path, "start()")
    assert ended.returncode == 1
    assert 'construct the engine under if __name__ == "__main__":' in ended.stderr
    assert "EngineUnavailableError" in ended.stderr.splitlines()[-1] or (
        "phalanx.errors.EngineUnavailableError: the engine has failed" in ended.stderr
    )


@pytest.mark.long
def test_a_main_module_that_raises_when_it_is_imported_is_told(tmp_path):
    ended = run_script(
        tmp_path, "if __name__ == '__main__':\n    start()\nelse:\n    raise OSError('as asked')"
    )
    assert "failed while loading: OSError: as asked" in ended.stderr
    assert "in the worker:\nTraceback" in ended.stderr


def test_a_worker_refuses_to_start_workers_while_it_imports_its_main_module(monkeypatch):
    """As Python itself does: without that, each worker would start more."""
    import multiprocessing

    from phalanx.engine.workers.launch import preparation

    monkeypatch.setitem(vars(multiprocessing.current_process()), "_inheriting", True)
    with pytest.raises(ConfigurationError, match="this process is a worker itself"):
        preparation()
