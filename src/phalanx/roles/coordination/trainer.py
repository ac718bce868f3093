"""The trainer as one who has devices by turns: a process of somebody else's, which tells of itself.

What it holds is its own word, and the end of its process: the dead hold nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Protocol

import msgspec

from phalanx.device_ledger.processes import LinuxProcesses
from phalanx.errors import ConfigurationError, RoleOperationRefusedError
from phalanx.roles.coordination.order import check_label
from phalanx.roles.coordination.phase_operations import PhaseBusyError
from phalanx.roles.coordination.record import TrainerRecord
from phalanx.wire.phases import AttachTrainer, Holding


class Processes(Protocol):
    """The processes of this machine."""

    def started(self, pid: int) -> str | None:
        """What tells the process of this number from a later one; None where there is none."""
        ...

    def watch(self, pid: int, ended: Callable[[], None]) -> Callable[[], None]:
        """Call `ended` once it has ended, soon if it has already; what is returned ends that."""
        ...


class SystemProcesses:
    """The real ones. Belongs to a running event loop."""

    def started(self, pid: int) -> str | None:
        found = LinuxProcesses().of(pid)
        if found is None:
            return None
        try:
            os.close(os.pidfd_open(pid))  # there is none of a thread
        except OSError:
            return None
        return str(found.started)

    def watch(self, pid: int, ended: Callable[[], None]) -> Callable[[], None]:
        loop = asyncio.get_running_loop()
        try:
            opened = os.pidfd_open(pid)
        except ProcessLookupError:
            return loop.call_soon(ended).cancel
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, opened)
            loop.add_reader(opened, ended)
            stack.callback(loop.remove_reader, opened)
            return stack.pop_all().close


class Trainer:
    """The only one of a job. `changed` is called after it has changed by itself, with why in words."""

    def __init__(
        self,
        record: TrainerRecord | None,
        processes: Processes,
        changed: Callable[[str], None],
    ) -> None:
        """`record` is what is remembered of it from before a restart."""
        self._processes = processes
        self._changed = changed
        self._unwatch: Callable[[], None] | None = None
        self.record = record
        if record is None:
            return
        if record.pid is None:
            if record.holding is Holding.MEMORY:
                self.record = msgspec.structs.replace(record, holding=Holding.UNKNOWN)
        elif processes.started(record.pid) == record.started:
            self._watch(record)
        else:
            self.record = None

    @property
    def holding(self) -> Holding:
        return Holding.NOTHING if self.record is None else self.record.holding

    def check_attach(self, asked: AttachTrainer) -> str | None:
        """Whether it may be the trainer: when its process began, None without a process's number.

        Raises `ConfigurationError` for a process that is none, and `RoleOperationRefusedError` where
        another one is the trainer.
        """
        check_label("trainer_id", asked.trainer_id)
        started = None
        if asked.pid is not None:
            started = self._processes.started(asked.pid)
            if started is None:
                raise ConfigurationError(
                    f"pid={asked.pid} is no process of the control process's machine; give the"
                    " trainer's own, or null where it runs elsewhere"
                )
        known = self.record
        if known is None:
            return started
        same = known.trainer_id == asked.trainer_id
        lives = known.pid is not None and self._processes.started(known.pid) == known.started
        its = "elsewhere" if asked.pid is None else f"pid {asked.pid}"
        if lives and not (same and known.pid == asked.pid):
            raise RoleOperationRefusedError(
                f"trainer {known.trainer_id!r} is attached and runs (pid {known.pid}), so"
                f" {asked.trainer_id!r} ({its}) cannot be the trainer; end that one first"
            )
        if not lives and not same and known.holding is not Holding.NOTHING:
            raise RoleOperationRefusedError(
                f"trainer {known.trainer_id!r} has not released the devices, and nobody knows"
                f" whether it runs, so {asked.trainer_id!r} cannot be the trainer; where it holds"
                " nothing, say so: `phalanx phase recover --holds-nothing trainer`"
            )
        return started

    def attach(self, asked: AttachTrainer, started: str | None) -> None:
        """As `check_attach` has allowed."""
        self.forget()
        self.record = record = TrainerRecord(
            trainer_id=asked.trainer_id,
            pid=asked.pid,
            started=started,
            holding=Holding.MEMORY if asked.holds else Holding.NOTHING,
        )
        if asked.pid is not None:
            self._watch(record)

    def check_is(self, trainer_id: str) -> None:
        """Raises `RoleOperationRefusedError` where another one is the trainer, or none."""
        known = self.record
        if known is None or known.trainer_id != trainer_id:
            who = "no trainer is attached" if known is None else f"it is {known.trainer_id!r}"
            raise RoleOperationRefusedError(
                f"{trainer_id!r} is not the trainer of this job: {who}; attach first"
            )

    def check_seen(self, seen: int | None) -> None:
        """Raises `PhaseBusyError` for what was said before the trainer got its devices: it may have
        taken long to come here, and is no word on what the trainer holds now.
        """
        known = self.record
        if known is not None and seen is not None and seen < known.since:
            raise PhaseBusyError(
                f"seen={seen}: trainer {known.trainer_id!r} has told of itself or got its devices"
                f" since then, at number {known.since}; look at GET /v1/phases, and say it again if"
                " it is so"
            )

    def got(self, number: int) -> None:
        """With this change, its devices, or its word on them."""
        if self.record is not None:
            self.record = msgspec.structs.replace(self.record, since=number)

    def now_holds(self, holding: Holding) -> None:
        if self.record is not None:
            self.record = msgspec.structs.replace(self.record, holding=holding)

    def forget(self) -> None:
        """There is none any more; nobody watches its process."""
        self.record = None
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None

    def close(self) -> None:
        """Watch no longer, and remember it."""
        record = self.record
        self.forget()
        self.record = record

    def _watch(self, record: TrainerRecord) -> None:
        assert record.pid is not None
        pid = record.pid

        def ended() -> None:
            self.forget()
            self._changed(f"trainer {record.trainer_id!r} (pid {pid}) has ended")

        self._unwatch = self._processes.watch(pid, ended)
