"""An orderly end of workers that were told to leave, with patience that is limited in two stages."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from phalanx.clock import Clock
from phalanx.engine.workers import faults
from phalanx.engine.workers.worker import Stage, Worker
from phalanx.errors import EngineUnavailableError

logger = logging.getLogger(__name__)

TERMINATE_TIMEOUT_S = 2.0
"""How long a worker that was sent SIGTERM has before it is killed."""


class Stopping:
    """Waits `timeout_s`, then terminates, then kills. The first fault is kept."""

    def __init__(self, timeout_s: float, clock: Clock) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._terminated = False
        self.due_s: float | None = clock.monotonic_s() + timeout_s
        self.fault: EngineUnavailableError | None = None

    def blame(self, fault: EngineUnavailableError) -> None:
        """Something went wrong; the others still get their time."""
        logger.error("%s", fault)
        if self.fault is None:
            self.fault = fault

    def ended(self, worker: Worker, status: int) -> None:
        """A worker's process has ended; well if it said so before."""
        if status != 0 or worker.stage is not Stage.STOPPED:
            self.blame(faults.ended(worker, status))

    def check_time(self, alive: Iterable[Worker]) -> None:
        """Use force on who is still there when patience is over."""
        if self.due_s is None or self._clock.monotonic_s() < self.due_s:
            return
        if self._terminated:
            self.due_s = None
            for worker in alive:
                worker.process.kill()
            return
        self._terminated = True
        self.due_s = self._clock.monotonic_s() + TERMINATE_TIMEOUT_S
        for worker in alive:
            self.blame(faults.not_stopped(worker, self._timeout_s))
            worker.process.terminate()
