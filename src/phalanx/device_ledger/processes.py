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
        found = self.of(os.getpid())
        assert found is not None
        return found

    def is_alive(self, process: ProcessId) -> bool:
        return self.of(process.pid) == process

    def of(self, pid: int) -> ProcessId | None:
        """The one that has this number and may still hold memory; also one of a thread's number."""
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                # The name, in brackets, may hold anything.
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return None
        # One that was not waited for has given its memory back once its last thread has ended.
        if fields[0] in (b"Z", b"X") and int(fields[17]) <= 1:
            return None
        return ProcessId(pid, int(fields[19]))
