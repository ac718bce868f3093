"""A wait that ends at a given time, or earlier when something has changed."""

from __future__ import annotations

import asyncio

from phalanx.clock import Clock


class Alarm:
    """Belongs to one task, which alone waits; anybody on its event loop may wake it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._woken = asyncio.Event()

    def wake(self) -> None:
        self._woken.set()

    async def wait(self, until_s: float | None) -> None:
        """Until it is woken, or the monotonic clock shows `until_s`; None waits to be woken.

        A wake since the last wait counts.
        """
        delay_s = None if until_s is None else max(until_s - self._clock.monotonic_s(), 0.0)
        try:
            async with asyncio.timeout(delay_s):
                await self._woken.wait()
        except TimeoutError:
            pass
        self._woken.clear()
