"""An event loop in a thread of its own, for what has to be answered whatever the server is at."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import TypeVar

import uvloop

T = TypeVar("T")


class DoorThread:
    """Runs from the beginning until `close`."""

    def __init__(self, name: str) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def wait_for(self, work: Coroutine[None, None, T]) -> T:
        """What `work` gives or raises, in that thread; this one waits."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def run(self, work: Coroutine[None, None, T]) -> T:
        """As `wait_for`, while the caller's event loop goes on."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def close(self) -> None:
        """End the thread; nothing may run in it any more."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
