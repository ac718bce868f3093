"""How much host time each profiling range took, without what it spent in ranges inside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType


class StageTimes:
    """Seconds by range name since the start; each thread has ranges of its own."""

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._local = _Innermost()

    def range(self, name: str) -> Range:
        """Count what a `with` block takes."""
        return Range(name, self)

    def seconds(self) -> dict[str, float]:
        """A copy of the sums so far."""
        with self._lock:
            return dict(self._seconds)

    def enter(self, entered: Range) -> None:
        entered.outer, self._local.range = self._local.range, entered
        entered.began_s = self._now_s()

    def leave(self, left: Range) -> None:
        took_s = self._now_s() - left.began_s
        self._local.range = left.outer
        if left.outer is not None:
            left.outer.inside_s += took_s
        with self._lock:
            self._seconds[left.name] = self._seconds.get(left.name, 0.0) + took_s - left.inside_s


class Range:
    """One block that is being timed."""

    __slots__ = ("began_s", "inside_s", "name", "outer", "times")

    def __init__(self, name: str, times: StageTimes) -> None:
        self.name = name
        self.times = times
        self.outer: Range | None = None
        self.began_s = self.inside_s = 0.0

    def __enter__(self) -> None:
        self.times.enter(self)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.times.leave(self)


class _Innermost(threading.local):
    range: Range | None = None
