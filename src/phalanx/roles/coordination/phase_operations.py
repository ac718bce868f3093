"""The operations on a job's phases by their callers' ids: one at a time, and each done once.

The same id with the same meaning joins what runs or gets the outcome that is known; the same id with
another meaning is refused, also after a restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field

from phalanx.errors import (
    EngineUnavailableError,
    PhalanxError,
    RoleOperationFailedError,
    RoleOperationRefusedError,
)
from phalanx.roles.coordination.journal import MAX_OPERATIONS
from phalanx.roles.coordination.order import check_label
from phalanx.roles.coordination.record import OperationRecord, Outcome

logger = logging.getLogger(__name__)
Act = Callable[[], Coroutine[object, object, None]]
GiveUp = Callable[[str], bool]
"""Ends what runs for the sake of an operation of this meaning; False where it is not to be ended."""
MAX_JOINED = 100


class PhaseBusyError(RoleOperationRefusedError):
    """Another operation is under way; nothing has changed, and it may be asked for again later."""


@dataclass(eq=False)
class RunningOperation:
    """`ids` are those of all who have asked for it."""

    meaning: str
    target: str | None
    since_wall_s: float
    ids: list[str] = field(default_factory=list)
    task: asyncio.Task[None] | None = None


class PhaseOperations:
    """`records` are those known from before."""

    def __init__(self, records: Iterable[OperationRecord]) -> None:
        self._records = {record.operation_id: record for record in records}
        self._closed = False
        self.running: RunningOperation | None = None

    async def run(
        self,
        operation_id: str,
        meaning: str,
        begin: Callable[[], tuple[RunningOperation, Act]],
        give_up: GiveUp = lambda meaning: False,
    ) -> None:
        """Have it done, or wait until it is. `begin` is asked where nothing runs and this is new; it
        may refuse by raising. Another one that runs is asked by `give_up` to end first.

        Cancelling a caller leaves it running. Raises what it does, and `RoleOperationRefusedError`.
        """
        check_label("operation_id", operation_id)
        while not self._is_known(operation_id, meaning):
            running = self.running
            if running is None or running.meaning == meaning or not give_up(meaning):
                break
            assert running.task is not None
            await asyncio.wait([running.task])
        else:
            return
        running = self.running
        if running is None:
            running, act = begin()
            running.ids.append(operation_id)
            running.task = asyncio.create_task(self._alone(act))
            running.task.add_done_callback(_log_fault)
            self.running = running
        else:
            self._join(running, operation_id, meaning)
        assert running.task is not None
        await asyncio.wait([running.task])
        if running.task.cancelled():
            raise _closed()
        running.task.result()

    def note(self, record: OperationRecord) -> None:
        """What is known of an operation now."""
        self._records.pop(record.operation_id, None)
        self._records[record.operation_id] = record
        while len(self._records) > MAX_OPERATIONS:
            del self._records[next(iter(self._records))]

    async def close(self) -> None:
        """None begins any more. What runs is cancelled, and has ended when this returns."""
        self._closed = True
        if self.running is not None and self.running.task is not None:
            self.running.task.cancel()
            await asyncio.wait([self.running.task])

    def _is_known(self, operation_id: str, meaning: str) -> bool:
        """Whether it was done before. Raises where it failed, or means something else, and where no
        operation begins any more.
        """
        if self._closed:
            raise _closed()
        running = self.running
        record = self._records.get(operation_id)
        known = None if record is None else record.meaning
        if running is not None and operation_id in running.ids:
            known = running.meaning
        if known is not None and known != meaning:
            raise RoleOperationRefusedError(
                f"operation {operation_id!r} was asked to {known}, and now to {meaning}; give"
                " another operation another operation_id"
            )
        if record is not None and record.outcome is Outcome.FAILED:
            raise RoleOperationFailedError(record.detail)
        return record is not None and record.outcome is Outcome.DONE

    def _join(self, running: RunningOperation, operation_id: str, meaning: str) -> None:
        if running.meaning != meaning or len(running.ids) >= MAX_JOINED:
            raise PhaseBusyError(
                f"the job is asked to {running.meaning} (operation {running.ids[0]!r}), which is"
                f" under way, so it cannot {meaning}; wait for its end, which"
                " `phalanx phase --watch` shows, and GET /v1/phases?after=NUMBER&wait_s=20"
            )
        if operation_id not in running.ids:
            running.ids.append(operation_id)

    async def _alone(self, act: Act) -> None:
        try:
            await act()
        finally:
            self.running = None


def _log_fault(task: asyncio.Task[None]) -> None:
    """Nobody may be left who takes what it raises; a fault of ours must not stay unknown."""
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, PhalanxError):
        logger.error("an operation on the phases failed", exc_info=error)


def _closed() -> EngineUnavailableError:
    return EngineUnavailableError("the job is stopping; its phases stay as they are")
