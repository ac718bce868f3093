"""What a coordinator of phases stands on, without roles, files or processes: for driving it in a test.

A tenant notes what is done to it and can meet a scripted fault; a journal can be cut and refuse to be
written.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from phalanx.errors import RoleOperationFailedError, RoleOperationRefusedError
from phalanx.roles.contracts import EngineCallError
from phalanx.roles.coordination.record import OperationRecord, PhaseState, Remembered
from phalanx.roles.outlook import Absence
from phalanx.testing.role_faults import Faults
from phalanx.wire.phases import Holding


class FakeTenant:
    """A role that holds memory from its activation to its deactivation. Faults strike at
    `activate NAME`, `deactivate NAME` and `find_out NAME`; an uncertain one leaves what it holds
    unknown, and it refuses everything until `find_out`. `log` is shared by all who are to be seen in one order.
    `set_absence` says why it does not serve, from then on.
    """

    def __init__(self, name: str, faults: Faults, log: list[str]) -> None:
        self.name = name
        self.held = Holding.NOTHING
        self.really_holds = False
        self.phase: str | None = None
        self.startup_timeout_s = 60.0
        self._absence: Absence | None = None
        self._changed = asyncio.Event()
        self._faults = faults
        self._log = log

    def holding(self) -> Holding:
        return self.held

    async def activate(self) -> None:
        await self._change("activate", Holding.MEMORY)

    async def deactivate(self) -> None:
        await self._change("deactivate", Holding.NOTHING)

    async def find_out(self, *, holds_nothing: bool) -> None:
        if holds_nothing:
            self.held = Holding.NOTHING
            return
        await self._call("find_out", lambda: None)
        self.held = Holding.MEMORY if self.really_holds else Holding.NOTHING

    def absence(self) -> Absence | None:
        return self._absence

    def set_absence(self, absence: Absence | None) -> None:
        self._absence = absence
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def set_phase(self, phase: str | None) -> None:
        if phase != self.phase:
            self.phase = phase
            self._log.append(f"{self.name} is told phase {phase}")

    async def heard(self) -> None:
        await asyncio.sleep(0)

    async def _change(self, what: str, after: Holding) -> None:
        if self.held is after:
            return
        if self.held is Holding.UNKNOWN:
            raise RoleOperationRefusedError(f"{self.name} is blocked; unblock or recover it")
        before, self.held = self.held, Holding.UNKNOWN

        def act() -> None:
            self.really_holds = after is Holding.MEMORY

        try:
            await self._call(what, act)
        except EngineCallError as error:
            if not error.uncertain:
                self.held = before
            raise RoleOperationFailedError(f"{self.name}: {error}") from error
        self.held = after

    async def _call(self, what: str, act: Callable[[], None]) -> None:
        self._log.append(f"{what} {self.name}")
        await self._faults.strike(f"{what} {self.name}", act, crash=lambda: None)
        self._log.append(f"{what} {self.name}: done")


class MemoryJournal:
    """One in memory, which outlives its coordinators. `broken`: so many writes are refused."""

    def __init__(self) -> None:
        self.remembered: Remembered | None = None
        self.num_writes = 0
        self.broken = 0

    @property
    def where(self) -> str:
        return "the journal"

    def read(self) -> Remembered | None:
        return self.remembered

    def begin(self, remembered: Remembered) -> None:
        self._count()
        self.remembered = remembered

    def write(
        self, state: PhaseState, operation: OperationRecord | None = None, *, sync: bool = True
    ) -> None:
        self._count()
        assert self.remembered is not None
        self.remembered = self.remembered.after(state, operation)

    def close(self) -> None:
        """Nothing is open."""

    def _count(self) -> None:
        if self.broken > 0:
            self.broken -= 1
            raise RoleOperationFailedError("cannot write the journal: no space left on device")
        self.num_writes += 1


class FakeProcesses:
    """Processes by number, each with a start of its own."""

    def __init__(self) -> None:
        self._running: dict[int, str] = {}
        self._watches: dict[int, list[Callable[[], None]]] = {}
        self._count = 0

    def start(self, pid: int) -> None:
        self._count += 1
        self._running[pid] = f"start {self._count}"

    def end(self, pid: int) -> None:
        """It ends, and whoever watches it hears of it."""
        del self._running[pid]
        for ended in self._watches.pop(pid, []):
            ended()

    def started(self, pid: int) -> str | None:
        return self._running.get(pid)

    def watch(self, pid: int, ended: Callable[[], None]) -> Callable[[], None]:
        watches = self._watches.setdefault(pid, [])
        watches.append(ended)

        def unwatch() -> None:
            if ended in watches:
                watches.remove(ended)

        return unwatch
