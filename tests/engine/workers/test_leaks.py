"""Starting and stopping workers again and again leaves nothing behind."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest

from phalanx.engine.workers.lifecycle import LifecycleState
from phalanx.errors import EngineUnavailableError
from phalanx.testing.worker_runtimes import Deed, Misdeed, Phase
from tests.engine.workers.supervised import Recorder, children, supervise

pytestmark = pytest.mark.long


def held():
    """What this process holds of each kind that a group of workers takes."""
    gc.collect()
    mapped = Path("/proc/self/maps").read_text().count("memfd:phalanx")
    return {
        "children": children(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "descriptors": sorted(os.listdir("/proc/self/fd")),
        # Stand-ins have no torch and no OpenMP, whose files come and go with other processes.
        "shared memory": sorted(
            name for name in os.listdir("/dev/shm") if not name.startswith(("torch_", "__KMP_"))
        ),
        "mappings": mapped,
    }


def serve_once(listener):
    supervisor = supervise(listener=listener, shape={"ranks": 2}, execution_timeout_s=600.0)
    supervisor.start()
    supervisor.submit(0, 1, "small", "x")
    supervisor.submit(0, 2, "large", bytes(300_000))
    listener.answers(2)
    supervisor.close()
    assert supervisor.state is LifecycleState.STOPPED


def fail_once(listener):
    supervisor = supervise(listener=listener)
    supervisor.start()
    supervisor.submit(0, 1, "a", Misdeed(Phase.EXECUTING, Deed.KILL))
    listener.failures.get()
    supervisor.close()


def fail_to_start(listener):
    supervisor = supervise([Misdeed(Phase.LOADING, Deed.EXIT)], listener=listener)
    with pytest.raises(EngineUnavailableError):
        supervisor.start()
    supervisor.close()


@pytest.mark.parametrize(
    ("cycle", "count"),
    [(serve_once, 60), (fail_once, 20), (fail_to_start, 20)],
)
def test_r71_cycles_of_a_group_leak_nothing(cycle, count):
    cycle(Recorder())
    before = held()
    for _ in range(count):
        cycle(Recorder())
    assert held() == before


def test_a_group_that_failed_is_released_before_anybody_closes_it():
    before = held()
    listener = Recorder()
    supervisor = supervise(listener=listener)
    supervisor.start()
    supervisor.submit(0, 1, "a", Misdeed(Phase.EXECUTING, Deed.KILL))
    listener.failures.get()
    supervisor._thread.join()
    assert held() == before
    assert supervisor.state is LifecycleState.FAILED


def test_a_start_for_which_there_is_no_thread_leaves_nothing():
    before = held()
    supervisor = supervise()
    size = threading.stack_size(1 << 46)  # more than any machine has
    try:
        with pytest.raises(EngineUnavailableError, match="could not start its workers: can't"):
            supervisor.start()
    finally:
        threading.stack_size(size)
    assert supervisor.state is LifecycleState.FAILED
    supervisor.close()
    assert held() == before
