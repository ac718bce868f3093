"""Whether an engine takes requests: not while it gives memory back, nor before it can compute again."""

from __future__ import annotations

from phalanx.errors import EngineAsleepError
from phalanx.schema.statistics import EngineMemory


class Door:
    """Plain state; the request table calls it under its lock, so that nobody slips in.

    It stands open as long as nothing of the engine is asleep.
    """

    def __init__(self) -> None:
        self._memory = EngineMemory()
        self._num_falling_asleep = 0

    def refusal(self) -> EngineAsleepError | None:
        """Why a request that comes now is not taken, or None."""
        if not self._memory.ready:
            return self._memory.refusal()
        if self._num_falling_asleep:
            return EngineAsleepError("the engine falls asleep; the request was not started")
        return None

    def begin_sleep(self) -> None:
        """An operation is under way that may give memory back."""
        self._num_falling_asleep += 1

    def end_sleep(self) -> None:
        """It is over, whatever came of it."""
        self._num_falling_asleep -= 1

    def settle(self, memory: EngineMemory) -> None:
        """This is what the engine holds now."""
        self._memory = memory
