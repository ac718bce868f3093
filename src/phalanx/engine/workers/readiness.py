"""One thread's wait for many descriptors, each with what is to be done when it is ready."""

from __future__ import annotations

import select
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

READ = select.EPOLLIN
WRITE = select.EPOLLOUT
MAX_WAIT_S = 86_400.0
"""A longer wait is cut to this, as the system takes less than 25 days."""


class Descriptor(Protocol):
    def fileno(self) -> int: ...


Source = int | Descriptor


@dataclass(slots=True)
class _Watch:
    rank: int
    act: Callable[[int], None]
    events: int = READ


class Readiness:
    """Calls what stands for each ready descriptor; for one thread.

    A source is forgotten before it is closed.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watches: dict[int, _Watch] = {}

    def watch(self, source: Source, act: Callable[[int], None], *, rank: int = 0) -> None:
        """Call `act` with READ, and WRITE where it is wanted, whenever the source is ready.

        A source that has come to its end is ready for both. Of several that are ready together,
        those of the lowest rank are called first.
        """
        descriptor = _descriptor(source)
        self._epoll.register(descriptor, READ)
        self._watches[descriptor] = _Watch(rank, act)

    def want_write(self, source: Source, wanted: bool) -> None:
        """Whether to wait for the source to be writable too; nothing where it is not watched."""
        descriptor = _descriptor(source)
        watch = self._watches.get(descriptor)
        events = READ | WRITE if wanted else READ
        if watch is not None and watch.events != events:
            watch.events = events
            self._epoll.modify(descriptor, events)

    def forget(self, source: Source) -> None:
        """Watch this source no more, if it was watched."""
        descriptor = _descriptor(source)
        if self._watches.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def wait(self, timeout_s: float | None) -> None:
        """Wait for something to be ready, at most this long or a day, and do what stands for it.

        What is called may forget others: those are still called, if they were ready.
        """
        ready = self._epoll.poll(None if timeout_s is None else min(timeout_s, MAX_WAIT_S))
        if len(ready) == 1:
            ((descriptor, events),) = ready
            self._watches[descriptor].act(_mask(events))
            return
        calls = [(self._watches[descriptor], _mask(events)) for descriptor, events in ready]
        calls.sort(key=lambda call: call[0].rank)
        for watch, mask in calls:
            watch.act(mask)

    def close(self) -> None:
        """Drop the watches; the descriptors stay their owners'."""
        self._watches.clear()
        self._epoll.close()


def _descriptor(source: Source) -> int:
    return source if isinstance(source, int) else source.fileno()


def _mask(events: int) -> int:
    """READ and WRITE; an error or an end of the source is both."""
    return events if not events & ~(READ | WRITE) else READ | WRITE
