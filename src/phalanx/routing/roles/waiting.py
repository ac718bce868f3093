"""Waiting for the next snapshot of a role: any number wait, and one change wakes all of them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from phalanx.routing.roles.snapshot import RoleSnapshot

NUM_AT_ONCE = 64
"""Woken in one turn of the event loop, so that what else it has to do waits for no more of them."""


class SnapshotWaiters:
    """Belongs to one event loop, on which alone it is used. `current` gives the newest snapshot."""

    def __init__(self, current: Callable[[], RoleSnapshot]) -> None:
        self._current = current
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._to_wake: deque[asyncio.Future[None]] = deque()
        self._closed = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def wait(
        self, after_revision: int, timeout_s: float | None, epoch: str | None = None
    ) -> RoleSnapshot:
        """The newest snapshot, as soon as it is another than that of revision `after_revision` (and
        of `epoch`), when `timeout_s` have passed, or when it is closed. None waits for ever.
        """
        if self._closed or not self._seen(after_revision, epoch):
            return self._current()
        # Whoever is woken returns, whatever it is then: there is something newer than when it came.
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        self._waiting[woken] = None
        timer = None if timeout_s is None else loop.call_later(timeout_s, _set, woken)
        try:
            await woken
        finally:
            self._waiting.pop(woken, None)
            if timer is not None:
                timer.cancel()
        return self._current()

    def wake(self) -> None:
        """There is a newer snapshot."""
        if not self._waiting:
            return
        is_idle = not self._to_wake
        self._to_wake.extend(self._waiting)
        self._waiting = {}
        if is_idle:
            self._wake_some()

    def close(self) -> None:
        """Answer everybody who waits; nobody waits any more."""
        self._closed = True
        for woken in (*self._to_wake, *self._waiting):
            _set(woken)
        self._to_wake.clear()
        self._waiting = {}

    def _wake_some(self) -> None:
        for _ in range(min(NUM_AT_ONCE, len(self._to_wake))):
            _set(self._to_wake.popleft())
        if self._to_wake:
            asyncio.get_running_loop().call_soon(self._wake_some)

    def _seen(self, revision: int, epoch: str | None) -> bool:
        current = self._current()
        return current.revision == revision and epoch in (None, current.epoch)


def _set(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
