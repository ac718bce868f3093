"""Which requests must have ended by when; every request of a group has the same time."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from phalanx.clock import Clock


@dataclass(frozen=True, slots=True)
class Expired:
    """A request that took too long, and how long it has been since its submit."""

    number: int
    rid: str
    elapsed_s: float


class Deadlines:
    """Times of the requests in flight, the earliest first; safe to use from any thread.

    Since the clock is read under the lock and the allowance is the same for all, requests expire
    in the order in which they were added, and what has ended leaves nothing behind. Without a
    time-out they are kept as well, so that an error can name its request.
    """

    def __init__(self, timeout_s: float | None, clock: Clock) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._submitted: dict[int, tuple[str, float]] = {}

    @property
    def num_pending(self) -> int:
        """How many requests are in flight."""
        return len(self._submitted)

    def add(self, number: int, rid: str) -> float | None:
        """A request was submitted now; returns when it expires (None: never)."""
        with self._lock:
            now_s = self._clock.monotonic_s()
            self._submitted[number] = rid, now_s
        return None if self._timeout_s is None else now_s + self._timeout_s

    def remove(self, number: int) -> None:
        """The request has ended, or was never sent."""
        with self._lock:
            self._submitted.pop(number, None)

    def rid(self, number: int) -> str | None:
        """The id of a request in flight."""
        with self._lock:
            submitted = self._submitted.get(number)
        return None if submitted is None else submitted[0]

    def next_s(self) -> float | None:
        """When the first of them expires; None where there is none."""
        if self._timeout_s is None:
            return None
        with self._lock:
            for _, submitted_s in self._submitted.values():
                return submitted_s + self._timeout_s
        return None

    def expired(self) -> list[Expired]:
        """All requests whose time is over now."""
        if self._timeout_s is None:
            return []
        late = []
        with self._lock:
            now_s = self._clock.monotonic_s()
            for number, (rid, submitted_s) in self._submitted.items():
                if now_s < submitted_s + self._timeout_s:
                    break
                late.append(Expired(number, rid, now_s - submitted_s))
        return late
