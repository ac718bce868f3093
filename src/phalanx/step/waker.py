"""How something outside (a transfer that has landed) gets the steps driven on."""

from __future__ import annotations

import threading
from collections.abc import Callable


def _nobody() -> None:
    """Nobody sleeps."""


class Waker:
    """Remembers that it was woken until somebody takes note; from any thread.

    Whoever answers `ready=False` sees to it that `wake` is called once that may have changed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._woken = False
        self._call: Callable[[], None] = _nobody

    @property
    def woken(self) -> bool:
        """Whether it was woken since the last `take`."""
        return self._woken

    def bind(self, call: Callable[[], None]) -> None:
        """Call this too at each `wake`, on the waking thread; it must not block."""
        with self._lock:
            self._call = call
            woken = self._woken
        if woken:
            call()

    def wake(self) -> None:
        with self._lock:
            self._woken = True
            call = self._call
        call()

    def take(self) -> bool:
        """Whether it was woken; from here on it was not."""
        with self._lock:
            woken, self._woken = self._woken, False
        return woken
