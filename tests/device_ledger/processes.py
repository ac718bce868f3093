"""Processes that live and die as a test says, and writes that end in the middle."""

from __future__ import annotations

import os

from phalanx.device_ledger.processes import ProcessId


class FakeProcesses:
    """Of the process `current`, which a test may change."""

    def __init__(self) -> None:
        self.current = ProcessId(1000, 1)
        self.dead: set[ProcessId] = set()

    def own(self) -> ProcessId:
        return self.current

    def is_alive(self, process: ProcessId) -> bool:
        return process not in self.dead


class KilledError(BaseException):
    """The process was killed while it wrote."""


class TornWrite:
    """Writes so many bytes, one at a time, and is killed."""

    def __init__(self, num_bytes: int) -> None:
        self.left = num_bytes

    def __call__(self, file: int, data: bytes, at: int) -> int:
        if self.left == 0:
            raise KilledError
        self.left -= 1
        return os.pwrite(file, data[:1], at)
