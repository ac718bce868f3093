"""What of a job outlives its processes, and the processes of its machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from phalanx.errors import RoleOperationFailedError
from phalanx.roles.coordination.record import OperationRecord, PhaseState, Remembered
from phalanx.testing.job_world_faults import Life, ProcessEndedError, Script, WorldFault
from phalanx.testing.phase_fakes import FakeProcesses

HEARD_AFTER_S = 0.2
_UNWRITTEN = frozenset({WorldFault.FAILS, WorldFault.LOST, WorldFault.HANGS, WorldFault.LATE})
_UNSURE = frozenset({WorldFault.UNHEARD, WorldFault.HANGS_DONE, WorldFault.TWICE})


class FakeDisk:
    """`refusals` counts the writes of a journal that were answered with an error."""

    def __init__(self) -> None:
        self.remembered: Remembered | None = None
        self.refusals = 0

    def journal(self, script: Script, life: Life, end_control: Callable[[], None]) -> FakeJournal:
        """As one control process sees it."""
        return FakeJournal(self, script, life, end_control)


class FakeJournal:
    """A line is written whole or not at all, also where the process ends in the middle of it."""

    def __init__(
        self, disk: FakeDisk, script: Script, life: Life, end_control: Callable[[], None]
    ) -> None:
        self._disk = disk
        self._script = script
        self._life = life
        self._end_control = end_control
        self._known: Remembered | None = None

    @property
    def where(self) -> str:
        return "the journal"

    def read(self) -> Remembered | None:
        return self._disk.remembered

    def begin(self, remembered: Remembered) -> None:
        self._put(remembered)

    def write(
        self, state: PhaseState, operation: OperationRecord | None = None, *, sync: bool = True
    ) -> None:
        assert self._known is not None
        self._put(self._known.after(state, operation))

    def close(self) -> None:
        """Nothing is open."""

    def _put(self, remembered: Remembered) -> None:
        """What could not be written is written by the next one."""
        self._life.check()
        fault = self._script.take("journal")
        if fault is WorldFault.CONTROL_ENDS or fault is WorldFault.DIES:
            self._end()
        self._known = remembered
        if fault in _UNWRITTEN:
            self._disk.refusals += 1
            raise RoleOperationFailedError("cannot write the journal: no space left on device")
        self._disk.remembered = remembered
        if fault is WorldFault.CONTROL_ENDS_AFTER:
            self._end()
        if fault in _UNSURE:
            self._disk.refusals += 1
            raise RoleOperationFailedError("cannot write the journal: input/output error")

    def _end(self) -> None:
        self._end_control()
        self._life.end()  # also of one that is starting yet
        raise ProcessEndedError


class FakeMachine:
    """Processes by number. Whoever watches one hears of its end a moment later."""

    def __init__(self) -> None:
        self._processes = FakeProcesses()
        self._count = 100

    def start(self) -> int:
        """The number of a new one."""
        self._count += 1
        self._processes.start(self._count)
        return self._count

    def end(self, pid: int) -> None:
        self._processes.end(pid)

    def runs(self, pid: int) -> bool:
        return self._processes.started(pid) is not None

    def seen_by(self, life: Life) -> SeenProcesses:
        """As a process sees them for as long as it lives."""
        return SeenProcesses(self._processes, life)


class SeenProcesses:
    def __init__(self, processes: FakeProcesses, life: Life) -> None:
        self._processes = processes
        self._life = life

    def started(self, pid: int) -> str | None:
        return self._processes.started(pid)

    def watch(self, pid: int, ended: Callable[[], None]) -> Callable[[], None]:
        loop = asyncio.get_running_loop()

        def told() -> None:
            if self._life.is_alive and watches:
                ended()

        def later() -> None:
            loop.call_later(HEARD_AFTER_S, told)

        watches = [later]
        unwatch = self._processes.watch(pid, later)
        if self._processes.started(pid) is None:
            later()

        def end() -> None:
            watches.clear()
            unwatch()

        return end
