"""A worker's process from its first line to its last: say hello, load, be ready, serve, stop.

Python's own spawn restores the parent's import path and main module here, after the process has
tied its life to its parent's and has said hello; so neither a slow main module nor one that raises
is ever a silent or an orphaned process.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
from dataclasses import dataclass
from functools import partial
from multiprocessing import spawn
from typing import Any, BinaryIO, NoReturn

from phalanx import settings
from phalanx.engine.boundary import Raised, attempt
from phalanx.engine.workers.channel import connect
from phalanx.engine.workers.crashes import crash
from phalanx.engine.workers.messages import Hello, Ready, Stopped
from phalanx.engine.workers.pickled import Pickled
from phalanx.engine.workers.runtime import WorkerChannel, WorkerFactorySpec, WorkerRuntime

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Boot:
    """What a worker is told when it begins.

    `preparation` is that of `multiprocessing.spawn`; the classes of `factory` can be found once the
    main module is there.
    """

    worker_id: int
    replica_id: int
    replica_rank: int
    title: str
    preparation: dict[str, Any]
    factory: Pickled[WorkerFactorySpec]


def main(boot_file: BinaryIO, descriptor: int, parent_pid: int) -> NoReturn:
    """Run the worker and leave the process: with status 0 after an orderly end, else with 1."""
    die_with(parent_pid)
    settings.end_without_collecting()
    # Ctrl-C reaches every process of the terminal; what becomes of the workers is the parent's
    # choice. The parent started this process with the signal blocked, so that none is lost here.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with boot_file:
        boot: Boot = pickle.load(boot_file)
    _set_title(boot.title)
    channel = connect(socket.socket(fileno=descriptor))
    status = _live(boot, channel)
    channel.close()
    sys.exit(status)


def die_with(parent_pid: int) -> None:
    """Let the kernel kill this process when the thread that started it ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it ended before that
        sys.exit("the process that started this worker is gone")


def _live(boot: Boot, channel: WorkerChannel) -> int:
    channel.send(Hello(boot.worker_id, boot.replica_id, boot.replica_rank, os.getpid()))
    runtime = attempt(partial(_load, boot))
    if isinstance(runtime, Raised):
        return _crash(channel, "loading", runtime.error)
    for phase, step in (
        ("loading", partial(_be_ready, boot, runtime, channel)),
        ("serving", partial(runtime.serve, channel)),
        ("stopping", runtime.close),
    ):
        outcome = attempt(step)
        if isinstance(outcome, Raised):
            return _crash(channel, phase, outcome.error)
    _flush()
    with contextlib.suppress(OSError):  # the parent is gone
        channel.send(Stopped())
    return 0


def _load(boot: Boot) -> WorkerRuntime:
    with settings.importing():
        # The mark by which Python refuses to start processes from a main module without a guard.
        marks = vars(multiprocessing.current_process())
        marks["_inheriting"] = True
        try:
            spawn.prepare(boot.preparation)
            factory = boot.factory.load()
        finally:
            del marks["_inheriting"]
        make = factory.resolve()
    return make(factory.config)


def _be_ready(boot: Boot, runtime: WorkerRuntime, channel: WorkerChannel) -> None:
    channel.send(
        Ready(boot.worker_id, runtime.limits, dict(runtime.metadata()), runtime.statistics)
    )


def _crash(channel: WorkerChannel, phase: str, error: BaseException) -> int:
    """Say what raised. The parent kills this process when it hears of it."""
    _flush()
    with contextlib.suppress(OSError):
        channel.send(crash(phase, error))
    return 1


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _set_title(title: str) -> None:
    try:
        setproctitle = importlib.import_module("setproctitle")
    except ImportError:
        return
    setproctitle.setproctitle(title)
