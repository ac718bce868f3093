"""One thread's wait for many descriptors, each with what is to be done when it is ready."""

from __future__ import annotations

import selectors
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE
MAX_WAIT_S = 86_400.0
"""A longer wait is cut to this, as the system takes less than 25 days."""


class Descriptor(Protocol):
    def fileno(self) -> int: ...


Source = int | Descriptor


@dataclass(frozen=True, slots=True)
class _Watch:
    rank: int
    act: Callable[[int], None]


class Readiness:
    """Calls what stands for each ready descriptor; for one thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def watch(self, source: Source, act: Callable[[int], None], *, rank: int = 0) -> None:
        """Call `act` with READ, and WRITE where it is wanted, whenever the source is ready.

        Of several that are ready together, those of the lowest rank are called first.
        """
        self._selector.register(source, READ, _Watch(rank, act))

    def want_write(self, source: Source, wanted: bool) -> None:
        """Whether to wait for the source to be writable too; nothing where it is not watched."""
        key = self._selector.get_map().get(source)
        events = READ | WRITE if wanted else READ
        if key is not None and key.events != events:
            self._selector.modify(source, events, key.data)

    def forget(self, source: Source) -> None:
        """Watch this source no more, if it was watched."""
        if source in self._selector.get_map():
            self._selector.unregister(source)

    def wait(self, timeout_s: float | None) -> None:
        """Wait for something to be ready, at most this long or a day, and do what stands for it.

        What is called may forget others: those are still called, if they were ready.
        """
        ready = self._selector.select(None if timeout_s is None else min(timeout_s, MAX_WAIT_S))
        if len(ready) > 1:
            ready.sort(key=lambda event: event[0].data.rank)
        for key, mask in ready:
            key.data.act(mask)

    def close(self) -> None:
        """Drop the watches; the descriptors stay their owners'."""
        self._selector.close()
