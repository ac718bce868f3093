"""Phalanx's replicas put to the test: twice the work, one that is stopped, one that is killed, and
very many requests.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from command_loop import Message, answer_commands  # type: ignore[import-not-found]
from dispatch_phalanx_worker import open_engine  # type: ignore[import-not-found]

from phalanx import Engine, EngineUnavailableError
from phalanx.bench.busy_loop import iterations_for
from phalanx.bench.dispatch_plugin import DispatchOutput, DispatchRequest

TINY_ELEMENTS = 8
TINY_IN_FLIGHT = 64
OBSERVATION = {
    "images": [],
    "state": np.zeros(TINY_ELEMENTS, np.float32),
    "reply_elements": TINY_ELEMENTS,
}
Pending = Future[DispatchOutput]


class Replicas:
    """An engine of one replica and one of two, in one process; `scratch` is a folder for FIFOs."""

    def __init__(self, scratch: Path) -> None:
        self._fifo = scratch / "hold"
        os.mkfifo(self._fifo)
        self._engines = {count: open_engine(count) for count in (1, 2)}

    def describe(self) -> str:
        import phalanx

        return f"phalanx {phalanx.__version__}"

    def steps(self, num_replicas: int, count: int, num_iterations: int) -> float:
        """Seconds in which that many replicas run `count` steps each."""
        engine = self._engines[num_replicas]
        request = DispatchRequest(OBSERVATION, num_iterations)
        began_s = time.perf_counter()
        futures = [engine.submit(request) for _ in range(count * num_replicas)]
        for future in futures:
            future.result()
        return time.perf_counter() - began_s

    def beside_a_busy_one(self, count: int) -> Message:
        """Times of one request after another while the other replica is busy with one."""
        engine = self._engines[2]
        held = engine.submit(DispatchRequest(OBSERVATION, hold=str(self._fifo)))
        try:
            return _one_after_another(engine, count)
        finally:
            self._release()
            held.result()

    def beside_a_stopped_one(self, count: int, num_waiting: int) -> Message:
        """The same while the other replica's process is stopped, with requests waiting for it."""
        engine = self._engines[2]
        stopped, running = sorted(_pids(engine))
        with _stopped(stopped):
            with _stopped(running):
                # Both fill alike, so that half of them wait for the one that stays stopped.
                futures = [_submit(engine) for _ in range(2 * num_waiting)]
            pending = set(futures)
            while len(pending) > num_waiting:
                _, pending = wait(pending, return_when=FIRST_COMPLETED)
            times = _one_after_another(engine, count)
            if any(future.done() for future in pending):
                raise AssertionError("a stopped worker answered")
        pids = {future.result().pid for future in pending}
        if pids != {stopped}:
            raise AssertionError(f"the waiting requests were answered by {pids}, not {stopped}")
        return times

    def death(self, num_pending: int) -> float:
        """Seconds from killing one worker of two to the end of the last pending future."""
        with open_engine(2) as engine:
            victim, _ = _pids(engine)
            ends_s: list[float] = []
            all_ended = threading.Event()

            def ended(future: Pending) -> None:
                ends_s.append(time.perf_counter())
                if len(ends_s) == num_pending:
                    all_ended.set()

            request = DispatchRequest(OBSERVATION, hold=str(self._fifo))
            futures = [engine.submit(request) for _ in range(num_pending)]
            for future in futures:
                future.add_done_callback(ended)
            killed_s = time.perf_counter()
            os.kill(victim, signal.SIGKILL)
            all_ended.wait()
            for future in futures:
                if not isinstance(future.exception(), EngineUnavailableError):
                    raise AssertionError(f"a pending request ended with {future.exception()!r}")
        return max(ends_s) - killed_s

    def tiny_requests(self, count: int) -> Message:
        """Run that many; returns the resident memory of this process and of the worker then."""
        engine = self._engines[1]
        pending: deque[Pending] = deque()
        for _ in range(count):
            if len(pending) == TINY_IN_FLIGHT:
                pending.popleft().result()
            pending.append(_submit(engine))
        pids = {pending.popleft().result().pid for _ in range(len(pending))}
        (worker,) = pids
        return {"parent_bytes": _resident(os.getpid()), "worker_bytes": _resident(worker)}

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()

    def _release(self) -> None:
        """Let the one that waits at the FIFO go on, as soon as it does."""
        with self._fifo.open("w"):
            pass


def _submit(engine: Engine) -> Pending:
    future: Pending = engine.submit(DispatchRequest(OBSERVATION))
    return future


def _one_after_another(engine: Engine, count: int) -> Message:
    clock = time.perf_counter
    submits_s, trips_s = [], []
    for _ in range(count):
        began_s = clock()
        future = _submit(engine)
        submits_s.append(clock() - began_s)
        future.result()
        trips_s.append(clock() - began_s)
    return {"submits_s": submits_s, "trips_s": trips_s}


def _pids(engine: Engine) -> list[int]:
    """The replicas' processes; requests one after another take turns."""
    return list(dict.fromkeys(_submit(engine).result().pid for _ in range(2)))


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    """Stop a child of this process, and let it go on afterwards."""
    os.kill(pid, signal.SIGSTOP)
    try:
        os.waitid(os.P_PID, pid, os.WSTOPPED)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _resident(pid: int) -> int:
    process = psutil.Process(pid)
    resident: int = process.memory_info().rss
    return resident


def start(message: Message) -> Replicas:
    return Replicas(Path(message["scratch"]))


def calibrate(replicas: Replicas, message: Message) -> Message:
    return {"num_iterations": iterations_for(message["seconds"])}


def steps(replicas: Replicas, message: Message) -> Message:
    asked = message["num_replicas"], message["count"], message["num_iterations"]
    return {"seconds": replicas.steps(*asked)}


def busy(replicas: Replicas, message: Message) -> Message:
    return replicas.beside_a_busy_one(message["count"])


def stopped(replicas: Replicas, message: Message) -> Message:
    return replicas.beside_a_stopped_one(message["count"], message["num_waiting"])


def death(replicas: Replicas, message: Message) -> Message:
    return {"seconds": replicas.death(message["num_pending"])}


def tiny_requests(replicas: Replicas, message: Message) -> Message:
    return replicas.tiny_requests(message["count"])


if __name__ == "__main__":
    commands: dict[str, Any] = {
        "calibrate": calibrate,
        "steps": steps,
        "busy": busy,
        "stopped": stopped,
        "death": death,
        "tiny_requests": tiny_requests,
    }
    answer_commands(start, commands)
