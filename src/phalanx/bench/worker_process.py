"""A system under measurement in a process of its own, asked by JSON lines, its memory watched."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from phalanx.errors import MissingDependencyError, RequestFailedError

try:
    import psutil
except ImportError as error:
    raise MissingDependencyError(
        "benchmarks need psutil; install it with pip install 'phalanx[bench]'"
    ) from error

SAMPLE_S = 0.5
CLOSE_TIMEOUT_S = 20.0
INTERRUPT_TIMEOUT_S = 3.0
_LOG_TAIL = 1500


class WorkerProcess:
    """Starts the worker and ends it, with all of its children, when the block is left.

    What the system prints goes to `log`. `peak_bytes` is the largest resident memory that the
    process and its children had together so far, shared pages counted once a process.
    """

    def __init__(
        self, name: str, command: list[str], environment: Mapping[str, str], log: Path
    ) -> None:
        self.name = name
        self.peak_bytes = 0
        self._answering = False
        self._log = log
        self._output = log.open("w")
        # A session of its own: Ctrl-C reaches only the benchmark, which then stops its workers.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            text=True,
            env=dict(environment),
            start_new_session=True,
        )
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name=f"memory of {name}", daemon=True)
        self._watcher.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def ask(self, kind: str, **message: object) -> dict[str, object]:
        """Send one command and wait for its answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._answering = True
        try:
            self._process.stdin.write(json.dumps({"kind": kind, **message}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RequestFailedError(f"{self.name} ended in {kind!r}: {self._tail()}")
        self._answering = False
        answer: dict[str, object] = json.loads(line)
        if answer.pop("kind") == "failed":
            raise RequestFailedError(
                f"{self.name} failed in {kind!r}: {answer['error']}\n{self._tail()}"
            )
        return answer

    def cpu_s(self) -> float:
        """Processor time that the process and its living children have used."""
        total = 0.0
        for process in self._tree():
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
        return total

    def close(self) -> None:
        self._stopped.set()
        self._watcher.join()
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
            self._process.stdin.close()
            # An idle worker ends by itself; one that still works would first finish its command,
            # but is given the time to remove what would outlive it.
            if self._answering:
                self._signal_all(signal.SIGINT)
            self._process.wait(INTERRUPT_TIMEOUT_S if self._answering else CLOSE_TIMEOUT_S)
        self._signal_all(signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        self._output.close()

    def _signal_all(self, number: signal.Signals) -> None:
        """Send a signal to the process and its children, if there are any left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _watch(self) -> None:
        while not self._stopped.wait(SAMPLE_S):
            if not self._answering:
                continue  # looking costs processor time that another system is measured on
            total = 0
            for process in self._tree():
                try:
                    total += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self.peak_bytes = max(self.peak_bytes, total)

    def _tree(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _tail(self) -> str:
        self._output.flush()
        return f"the end of {self._log}:\n{self._log.read_text()[-_LOG_TAIL:]}"
