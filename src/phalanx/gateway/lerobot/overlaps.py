"""Whether two clients ask for the actions of what is known as one robot."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.clock import Clock

NUM_OVERLAPS = 5
OVERLAPS_S = 2.0

WORDS = (
    "two clients ask for this robot's actions at once, and neither is given any: they run in one "
    "process and share its connection, or send the same x-session-id; give each a port of its own "
    "(--lerobot-port) or another x-session-id, and restart both"
)


class Overlaps:
    """Calls for actions that begin while another one waits.

    One of them comes of a connection that broke; `NUM_OVERLAPS` within `OVERLAPS_S`, of two clients.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._num_waiting = 0
        self._times_s: deque[float] = deque(maxlen=NUM_OVERLAPS)

    @contextmanager
    def asking(self) -> Iterator[bool]:
        """A call runs; whether there are two clients."""
        if self._num_waiting:
            self._times_s.append(self._clock.monotonic_s())
        self._num_waiting += 1
        try:
            yield self._are_many
        finally:
            self._num_waiting -= 1

    def forget(self) -> None:
        self._times_s.clear()

    @property
    def _are_many(self) -> bool:
        times_s = self._times_s
        return len(times_s) == NUM_OVERLAPS and times_s[-1] - times_s[0] <= OVERLAPS_S
