"""An event loop whose time passes only when everybody waits for it, and then at once.

What takes hours runs in no time, in the same order every time. Where everybody waits and no time
would end it, it says so instead of hanging.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import TypeVar

from phalanx.testing.clock import ManualClock

T = TypeVar("T")


class StuckError(AssertionError):
    """Every task waits for something that will never happen."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Its time is that of `clock`, which it advances itself."""

    def __init__(self, clock: ManualClock | None = None) -> None:
        self.clock = clock or ManualClock()
        super().__init__(_Selector(self.clock))

    def time(self) -> float:
        return self.clock.monotonic_s()


def run_virtual(main: Coroutine[object, object, T], clock: ManualClock | None = None) -> T:
    """As `asyncio.run`, on a loop of virtual time."""
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(clock)) as runner:
        return runner.run(main)


class _Selector(selectors.DefaultSelector):
    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise StuckError("every task waits, and nothing is ever going to happen")
        self._clock.advance(max(timeout, 0.0))
        return []
