"""Waiting for the next snapshot of a role: any number wait, and one change wakes all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from phalanx.routing.roles.snapshot import RoleSnapshot


class SnapshotWaiters:
    """Belongs to one event loop, on which alone `wake` and `close` are called.

    `current` gives the newest snapshot.
    """

    def __init__(self, current: Callable[[], RoleSnapshot]) -> None:
        self._current = current
        self._changed = asyncio.Event()
        self._num_waiting = 0
        self._closed = False

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    async def wait(
        self, after_revision: int, timeout_s: float | None, epoch: str | None = None
    ) -> RoleSnapshot:
        """The newest snapshot, as soon as it is another than that of revision `after_revision` (and
        of `epoch`), when `timeout_s` have passed, or when it is closed. None waits for ever.
        """
        self._num_waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                while not self._closed and self._seen(after_revision, epoch):
                    await self._changed.wait()
        except TimeoutError:
            pass
        finally:
            self._num_waiting -= 1
        return self._current()

    def wake(self) -> None:
        """There is a newer snapshot."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def close(self) -> None:
        """Answer everybody who waits; nobody waits any more."""
        self._closed = True
        self._changed.set()

    def _seen(self, revision: int, epoch: str | None) -> bool:
        current = self._current()
        return current.revision == revision and epoch in (None, current.epoch)
