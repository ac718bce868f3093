"""How much a peer may do that costs something and brings nothing."""

from __future__ import annotations

import asyncio

from phalanx.gateway.http2.frames import ConnectionFault, ErrorCode


class Allowance:
    """`burst` at once, and `per_s` more each second."""

    def __init__(self, loop: asyncio.AbstractEventLoop, burst: int, per_s: float) -> None:
        self._loop = loop
        self._burst = burst
        self._per_s = per_s
        self._left = float(burst)
        self._filled_s = loop.time()

    def spend(self, words: str) -> None:
        """Raises `ConnectionFault` when nothing is left."""
        if self._left < 1.0:
            now_s = self._loop.time()
            self._left += (now_s - self._filled_s) * self._per_s
            self._left = min(self._left, float(self._burst))
            self._filled_s = now_s
            if self._left < 1.0:
                raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, f"too many {words}")
        self._left -= 1.0
