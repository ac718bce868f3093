"""What the tests of supervised workers share: plans, a listener that remembers, pipes with names."""

from __future__ import annotations

import os
import queue
import select
import signal
import threading
from concurrent.futures import Future
from pathlib import Path

from phalanx.engine.deployment_plan import DeploymentPlan
from phalanx.engine.workers.messages import Finished
from phalanx.engine.workers.supervisor import Tuning, WorkerSupervisor
from phalanx.schema.deployment import NodeResources, WorkerSupervisorConfig
from phalanx.schema.parallel import DenseParallelConfig, ParallelConfig
from phalanx.testing.worker_runtimes import stand_in_factory


def plan(replicas=1, ranks=1, output_rank=0, nodes=None):
    parallel = ParallelConfig(dense=DenseParallelConfig(tp_size=ranks))
    if nodes is None:
        nodes = (NodeResources(0, tuple(range(replicas * ranks))),)
    return DeploymentPlan.build(parallel, replicas, nodes, output_rank=output_rank)


class Recorder:
    """A listener; what it is told can be waited for. `on_reply` runs in the listener's place."""

    def __init__(self, on_reply=None):
        self.replies = queue.SimpleQueue()
        self.failures = queue.SimpleQueue()
        self._on_reply = on_reply

    def received(self, placement, reply, events):
        if self._on_reply is not None:
            self._on_reply(placement, reply, events)
        self.replies.put((placement.worker_id, reply, events))

    def failed(self, error):
        self.failures.put(error)

    def answers(self, count):
        """Payloads by request number, when this many have come."""
        found = {}
        while len(found) < count:
            _, reply, events = self.replies.get()
            if not isinstance(reply, Finished):
                found.update({number: event.payload for number, event in events})
        return found


def supervise(misdeeds=(), *, listener=None, report=(), clock=None, **config):
    """A supervisor of stand-ins that is not started; `shape` is given to `plan`."""
    shape = config.pop("shape", {})
    # However slow the machine is, a worker that dies is seen to die.
    tuning = Tuning(config.pop("arena_bytes", None), config.pop("status_timeout_s", 600.0))
    target = config.pop("target", "cpu")
    factory = config.pop("factory", stand_in_factory(*misdeeds, report=report))
    return WorkerSupervisor(
        plan(**shape),
        factory,
        WorkerSupervisorConfig(**config),
        Recorder() if listener is None else listener,
        target=target,
        clock=clock,
        tuning=tuning,
    )


def children() -> list[str]:
    """The processes that this one has, one line a thread that has any."""
    paths = Path("/proc/self/task").glob("*/children")
    return sorted(text for path in paths if (text := path.read_text().strip()))


class Pipe:
    """A named pipe that a worker announces itself on. Its reading end is open from the start."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        os.mkfifo(path)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def pid(self) -> int:
        """The worker's, when it has come."""
        line = b""
        while not line.endswith(b"\n"):
            self._wait()
            byte = os.read(self._descriptor, 1)
            assert byte, f"the worker ended before it had announced itself on {self.path}"
            line += byte
        return int(line)

    def ended(self) -> bool:
        """Whether everybody who held the pipe has ended; does not wait."""
        try:
            return os.read(self._descriptor, 1) == b""
        except BlockingIOError:
            return False

    def await_end(self) -> None:
        """Wait until the worker that announced itself has ended."""
        self._wait()
        assert os.read(self._descriptor, 1) == b""

    def close(self) -> None:
        os.close(self._descriptor)

    def _wait(self) -> None:
        # Does not return before the first writer has come, as a read would.
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        poll.poll()


class Gate:
    """A named pipe that WAIT reads; one worker can wait at it."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        os.mkfifo(path)

    def open(self) -> None:
        """Let the worker pass; waits for it to come."""
        os.close(os.open(self.path, os.O_WRONLY))


def in_background(call) -> Future:
    """Run it in a thread of its own, which ends with it."""
    future = Future()

    def run():
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run).start()
    return future


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def await_death(pid: int) -> None:
    """Wait until a process that need not be a child of this one has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
    os.close(descriptor)


def is_alive(pid: int) -> bool:
    """Whether the process is there, and not only its exit status."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
