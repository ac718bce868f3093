"""The calls that run in a client: each has a deadline, and all end when the client is closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from phalanx.errors import DeadlineExceededError, EngineUnavailableError


class RunningCalls:
    """Belongs to one event loop, whose clock deadlines are told by."""

    def __init__(self) -> None:
        self._timeouts: set[asyncio.Timeout] = set()
        self._closed = False
        self._all_ended = asyncio.Event()

    @property
    def closed(self) -> bool:
        return self._closed

    @asynccontextmanager
    async def call(self, end_s: float, what: str) -> AsyncIterator[None]:
        """A part of a call. What waits inside is cancelled at `end_s`, or when all are closed.

        Raises `DeadlineExceededError` then, or `EngineUnavailableError`.
        """
        if self._closed:
            raise _closed()
        timeout = asyncio.timeout_at(end_s)
        try:
            async with timeout:
                self._timeouts.add(timeout)
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            if self._closed:
                raise _closed() from None
            raise DeadlineExceededError(
                f"{what}: no whole answer before the deadline; it was cancelled"
            ) from None
        finally:
            self._timeouts.discard(timeout)
            if self._closed and not self._timeouts:
                self._all_ended.set()

    async def close(self) -> None:
        """End all calls and wait for that. No later one begins."""
        self._closed = True
        now_s = asyncio.get_running_loop().time()
        for timeout in self._timeouts:
            if not timeout.expired():
                timeout.reschedule(now_s)
        if self._timeouts:
            await self._all_ended.wait()


def _closed() -> EngineUnavailableError:
    return EngineUnavailableError("the client is closed; make a new one")
