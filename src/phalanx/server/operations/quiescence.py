"""Brings a server to a point where no request runs, for work that none may see half done.

New requests wait at the gate meanwhile, and running ones end, or stand still where the engine is
paused. A server whose engine is asleep holds nobody: requests are refused there at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from phalanx.schema.control import PauseMode
from phalanx.server.lifecycle import Lifecycle


class Quiescence:
    """Belongs to the server's event loop; told of every pause, and of sleep and waking."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._num_holds = 0
        self._session = False
        self._asleep = False
        self._paused: PauseMode | None = None
        self._stands_still = asyncio.Event()

    @property
    def paused(self) -> bool:
        """Whether the engine computes nothing until it is told to continue."""
        return self._paused is not None

    def note_pause(self, mode: PauseMode) -> None:
        self._paused = mode
        self._stands_still.set()

    def note_continue(self) -> None:
        self._paused = None
        self._stands_still.clear()

    def note_asleep(self, asleep: bool) -> None:
        self._asleep = asleep
        self._update()

    @contextmanager
    def holding(self) -> Iterator[None]:
        """New requests wait at the gate while this is open."""
        self._num_holds += 1
        self._update()
        try:
            yield
        finally:
            self._num_holds -= 1
            self._update()

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """Open once no request runs; none begins before it is closed."""
        with self.holding():
            await self.settled()
            yield

    async def settled(self) -> None:
        """Wait until no request is being answered, or the engine is paused."""
        idle = asyncio.create_task(self._lifecycle.idle(None))
        still = asyncio.create_task(self._stands_still.wait())
        try:
            await asyncio.wait((idle, still), return_when=asyncio.FIRST_COMPLETED)
        finally:
            idle.cancel()
            still.cancel()

    def open_session(self) -> None:
        """Several operations belong together: requests wait until the last. Any number of times."""
        self._session = True
        self._update()

    def close_session(self) -> None:
        """Any number of times, also without one."""
        self._session = False
        self._update()

    def _update(self) -> None:
        held = self._num_holds > 0 or self._session
        self._lifecycle.admit(self._asleep or not held)
