"""A deadline that is moved with every request and seldom reached, at the price of few timers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

NEVER = math.inf


class Deadline:
    """Calls `on_passed` once when the time that was last set has come.

    A timer that is due earlier than the deadline is left as it is, and set anew when it fires.
    """

    __slots__ = ("_at", "_due", "_loop", "_on_passed", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, on_passed: Callable[[], None]) -> None:
        self._loop = loop
        self._on_passed = on_passed
        self._at = NEVER
        self._due = NEVER
        self._timer: asyncio.TimerHandle | None = None

    def set(self, delay_s: float) -> float:
        """Let it pass in `delay_s` seconds; returns the time by the loop's clock."""
        now = self._loop.time()
        at = self._at = now + delay_s
        if at < self._due:
            if self._timer is not None:
                self._timer.cancel()
            self._arm(at)
        return now

    def clear(self) -> None:
        """Let it never pass, until it is set."""
        self._at = NEVER

    def close(self) -> None:
        """As `clear`, for good."""
        self._at = NEVER
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, at: float) -> None:
        self._due = at
        self._timer = self._loop.call_at(at, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._due = NEVER
        if self._at == NEVER:
            return
        if self._loop.time() < self._at:
            self._arm(self._at)
        else:
            self._at = NEVER
            self._on_passed()
