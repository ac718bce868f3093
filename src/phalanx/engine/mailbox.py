"""One wake-up of an asyncio event loop for all of its streams.

A step that produced output for many streams costs one system call, not one for each.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from typing import Protocol


class Waker(Protocol):
    """A stream's end in the event loop."""

    def wake(self) -> None:
        """Called in the event loop: there is something to take."""
        ...


class Mailbox:
    """The streams of one event loop that wait for output and have some."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._ready: set[Waker] = set()
        self._scheduled = False

    def add(self, waker: Waker) -> None:
        """From any thread: wake this stream at the next `wake`."""
        self._ready.add(waker)

    def wake(self) -> bool:
        """From any thread: wake what was added; False where the event loop is closed."""
        if self.loop.is_closed():
            return False
        if self._scheduled or not self._ready:
            return True
        self._scheduled = True
        try:
            self.loop.call_soon_threadsafe(self._drain)
        except RuntimeError:  # it was closed in this moment
            return False
        return True

    def _drain(self) -> None:
        # Cleared first: what is added from here on either is drained below or schedules anew.
        self._scheduled = False
        while self._ready:
            self._ready.pop().wake()


class Mailboxes:
    """One mailbox for each event loop that has streams; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: weakref.WeakValueDictionary[asyncio.AbstractEventLoop, Mailbox] = (
            weakref.WeakValueDictionary()
        )

    def of(self, loop: asyncio.AbstractEventLoop) -> Mailbox:
        with self._lock:
            mailbox = self._known.get(loop)
            if mailbox is None:
                mailbox = self._known[loop] = Mailbox(loop)
            return mailbox
