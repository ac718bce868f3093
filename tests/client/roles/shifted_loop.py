"""An event loop whose clock a test can move on, so that deadlines pass when it says so."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine


class ShiftedLoop(asyncio.SelectorEventLoop):
    shift_s = 0.0

    def time(self) -> float:
        return super().time() + self.shift_s


def advance(seconds: float) -> None:
    """What was to be in `seconds` is now."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ShiftedLoop)
    loop.shift_s += seconds


def run_shifted(work: Coroutine[None, None, None]) -> None:
    with asyncio.Runner(loop_factory=ShiftedLoop) as runner:
        runner.run(work)
