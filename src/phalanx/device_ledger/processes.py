"""Which processes of this machine live: a pid alone does not tell, since it is used again."""

from __future__ import annotations

import os
from typing import NamedTuple, Protocol


class ProcessId(NamedTuple):
    """One process of all that this machine has ever had: a pid is used again, with another start.

    `started` counts the kernel's ticks since the machine was started.
    """

    pid: int
    started: int


class Processes(Protocol):
    """The processes of the machine."""

    def own(self) -> ProcessId:
        """The calling one."""
        ...

    def is_alive(self, process: ProcessId) -> bool:
        """Whether it may still hold memory."""
        ...


class LinuxProcesses:
    """Those that `/proc` shows."""

    def own(self) -> ProcessId:
        pid = os.getpid()
        return ProcessId(pid, _status(pid).started)

    def is_alive(self, process: ProcessId) -> bool:
        try:
            status = _status(process.pid)
        except OSError:
            return False
        return status.started == process.started and not status.has_ended


class _Status(NamedTuple):
    started: int
    has_ended: bool


def _status(pid: int) -> _Status:
    with open(f"/proc/{pid}/stat", "rb") as file:
        # The name, in brackets, may hold anything.
        fields = file.read().rpartition(b")")[2].split()
    # One that was not waited for has given its memory back once its last thread has ended.
    return _Status(int(fields[19]), fields[0] in (b"Z", b"X") and int(fields[17]) <= 1)
