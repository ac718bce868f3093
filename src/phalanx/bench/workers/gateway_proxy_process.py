"""What every proxy's process of the gateway benchmark answers: where it listens, and what it used."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from command_loop import Message, answer_commands  # type: ignore[import-not-found]

HOST = "127.0.0.1"
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
RETRY_S = 0.05


class Proxy(Protocol):
    """A running proxy; `pids` are the processes whose time counts. `grpc_port` 0: it has none."""

    port: int
    grpc_port: int

    def pids(self) -> list[int]: ...
    def describe(self) -> str: ...
    def close(self) -> None: ...


def serve(start: Callable[[Message], Proxy]) -> None:
    """Answer commands until the input ends. `start` gets the backends' `ports` and `grpc_ports`, a `scratch` folder
    and the `cores` to run on.
    """

    def started(message: Message) -> Proxy:
        if message["cores"]:
            os.sched_setaffinity(0, message["cores"])
        return start(message)

    answer_commands(started, {"port": _port, "cpu": _cpu})


def _port(proxy: Proxy, message: Message) -> Message:
    return {"port": proxy.port, "grpc_port": proxy.grpc_port}


def _cpu(proxy: Proxy, message: Message) -> Message:
    return {"seconds": sum(map(_cpu_s, proxy.pids()))}


def _cpu_s(pid: int) -> float:
    """Time of all living threads of a process, in nanoseconds where `stat` has hundredths."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port: int = listener.getsockname()[1]
        return port


class CommandProxy:
    """A proxy that is a program of its own, with its workers as children."""

    def __init__(self, command: list[str], port: int, version: str, *, grpc_port: int = 0) -> None:
        self.port = port
        self.grpc_port = grpc_port
        self._version = version
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self._await_port()

    def pids(self) -> list[int]:
        found = [self._process.pid]
        for pid in found:
            for task in Path(f"/proc/{pid}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        return found

    def describe(self) -> str:
        return self._version

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _await_port(self) -> None:
        """Programs of others say nowhere when they are ready."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                socket.create_connection((HOST, self.port), 1.0).close()
                return
            except OSError:
                if time.monotonic() > deadline_s:
                    self.close()
                    raise
            with contextlib.suppress(subprocess.TimeoutExpired):
                raise RuntimeError(f"it ended with status {self._process.wait(RETRY_S)}")


def version_of(command: list[str]) -> str:
    """The first line that says it."""
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = (answer.stdout + answer.stderr).strip().splitlines()
    return lines[0].strip() if lines else command[0]
