"""Who follows a role's snapshots from outside, such as a gateway, and how far each has come.

Requests are sent by the last snapshot that a follower has; it has taken one when it asks for the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = 2.0
"""One that has not asked again by then hangs, or is gone."""
NOTHING = -1


class Followers:
    """Of one role. Belongs to one event loop."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}
        self._leaving: dict[str, asyncio.TimerHandle] = {}
        self._changed = asyncio.Event()

    @contextmanager
    def asking(self, name: str, revision: int) -> Iterator[None]:
        """It has `revision`, or `NOTHING` yet, and asks for a later one while this is open."""
        leaving = self._leaving.pop(name, None)
        if leaving is not None:
            leaving.cancel()
        self._seen[name] = revision
        self._tell()
        try:
            yield
        finally:
            loop = asyncio.get_running_loop()
            self._leaving[name] = loop.call_later(PATIENCE_S, self._forget, name)

    async def have(self, revision: int) -> None:
        """Wait until all of them have this one or a later one, for as long as it is sensible."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while any(seen < revision for seen in self._seen.values()):
                    await self._changed.wait()
        except TimeoutError:
            pass

    def _forget(self, name: str) -> None:
        del self._leaving[name], self._seen[name]
        self._tell()

    def _tell(self) -> None:
        # Whoever waits holds the old one; the next to wait gets a new one.
        self._changed.set()
        self._changed = asyncio.Event()
