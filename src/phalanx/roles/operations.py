"""The operations of a manager: one after the other, each shared by all who ask for the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable

from phalanx.errors import EngineUnavailableError


class Operations:
    """An operation that is asked for again while it runs or waits, and nothing else was asked for
    since, is shared. Callers may leave; it goes on.
    """

    def __init__(self, role: str, lock: asyncio.Lock) -> None:
        self._role = role
        self._lock = lock
        self._tasks: set[asyncio.Task[None]] = set()
        self._newest: tuple[Hashable, asyncio.Task[None]] | None = None
        self._is_open = True

    async def run(self, key: Hashable, act: Callable[[], Coroutine[object, object, None]]) -> None:
        """Raises what the operation does, and `EngineUnavailableError` after `end`."""
        if not self._is_open:
            raise self._closed()
        newest = self._newest
        if newest is not None and newest[0] == key and not newest[1].done():
            task = newest[1]
        else:
            task = asyncio.create_task(self._alone(act))
            self._tasks.add(task)
            task.add_done_callback(self._ended)
            self._newest = (key, task)
        await asyncio.wait([task])
        if task.cancelled():
            raise self._closed()
        task.result()

    async def end(self) -> None:
        """Cancel those that run and wait; none begins any more. Returns when they have ended."""
        self._is_open = False
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))

    async def _alone(self, act: Callable[[], Coroutine[object, object, None]]) -> None:
        async with self._lock:
            await act()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # nobody may be left who takes it

    def _closed(self) -> EngineUnavailableError:
        return EngineUnavailableError(f"the manager of role {self._role!r} is shut down")
