"""What is kept for others, each for a limited time: the barrier that pages pass before they are
free again. Every hold ends once: it is taken, dropped, expires, or is closed with its engine.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from phalanx.clock import Clock
from phalanx.errors import RequestFailedError
from phalanx.step.transfer.base import TAKEN, Content, Ending, HeldState, PageRead, Reason

Watcher = Callable[[Ending], None]
MAX_ENDINGS = 4096
UNKNOWN = Ending(Reason.CLOSED, "nothing was held under this id")


@dataclass
class _Hold:
    state: HeldState
    deadline_s: float
    num_readers: int = 0
    ending: Ending | None = None
    watchers: list[Watcher] = field(default_factory=list)


class Holds:
    """See the module. Safe to share between threads; watchers are called without its lock."""

    def __init__(self, clock: Clock, ttl_s: float) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._holds: dict[str, _Hold] = {}
        self._endings: dict[str, Ending] = {}
        """Of the newest holds that have ended, for those who ask late."""

    def __len__(self) -> int:
        return len(self._holds)

    def add(self, state: HeldState) -> str:
        """Keep `state` for at most the time limit; returns the id that readers give."""
        key = secrets.token_hex(8)
        with self._lock:
            self._holds[key] = _Hold(state, self._clock.monotonic_s() + self._ttl_s)
        return key

    @contextmanager
    def reading(self, key: str, read: PageRead) -> Iterator[Content]:
        """The content of a hold, which is not freed meanwhile. Raises `RequestFailedError`."""
        with self._lock:
            hold = self._live(key)
            hold.num_readers += 1
        try:
            yield hold.state.open(read)
        finally:
            with self._lock:
                hold.num_readers -= 1
            self._settle(key, hold)

    def take_back(self, key: str) -> HeldState:
        """End a hold as taken and return its state, which is not freed.

        Raises `RequestFailedError` where it has ended or somebody reads it.
        """
        with self._lock:
            hold = self._live(key)
            if hold.num_readers:
                raise RequestFailedError("what is held under this id is being read")
            hold.ending = TAKEN
            del self._holds[key]
            self._remember(key, TAKEN)
        for watcher in hold.watchers:
            watcher(TAKEN)
        return hold.state

    def end(self, key: str, ending: Ending) -> None:
        """A hold is needed no more; unknown ids are ignored."""
        with self._lock:
            hold = self._holds.get(key)
            if hold is None or hold.ending is not None:
                return
            hold.ending = ending
        self._settle(key, hold)

    def watch(self, key: str, watcher: Watcher) -> None:
        """Call `watcher` once the hold has ended; at once where it has."""
        with self._lock:
            hold = self._holds.get(key)
            if hold is not None:
                hold.watchers.append(watcher)
                return
            ending = self._endings.get(key, UNKNOWN)
        watcher(ending)

    def expire(self) -> float | None:
        """End what was kept too long; the seconds until the next may be due, None for no hold."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            live = [(key, hold) for key, hold in self._holds.items() if hold.ending is None]
            due = [key for key, hold in live if hold.deadline_s <= now_s]
            later = [hold.deadline_s for _, hold in live if hold.deadline_s > now_s]
        for key in due:
            self.end(key, Ending(Reason.EXPIRED, f"nobody took it within {self._ttl_s:g} s"))
        return min(later) - now_s if later else None

    def close(self) -> None:
        """End every hold."""
        for key in list(self._holds):
            self.end(key, Ending(Reason.CLOSED, "the engine that holds it was closed"))

    def _live(self, key: str) -> _Hold:
        """A hold that has not ended. Called with the lock held."""
        hold = self._holds.get(key)
        if hold is None or hold.ending is not None:
            raise RequestFailedError(
                "nothing is held under this id; it was read, dropped, or was kept longer than "
                f"the {self._ttl_s:g} s that it may"
            )
        return hold

    def _remember(self, key: str, ending: Ending) -> None:
        self._endings[key] = ending
        if len(self._endings) > MAX_ENDINGS:
            del self._endings[next(iter(self._endings))]

    def _settle(self, key: str, hold: _Hold) -> None:
        """Free a hold that has ended and that nobody reads."""
        with self._lock:
            if hold.ending is None or hold.num_readers or self._holds.pop(key, None) is None:
                return
            self._remember(key, hold.ending)
        hold.state.free()
        for watcher in hold.watchers:
            watcher(hold.ending)
