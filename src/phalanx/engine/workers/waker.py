"""Wakes a thread that waits in a selector."""

from __future__ import annotations

import os
import threading


class Waker:
    """A descriptor that is readable from `wake` to `clear`.

    `wake` may be called from anywhere and at any time, also after `close` and from a garbage
    collector's callback that interrupts another `wake`: hence the kind of lock.
    """

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.RLock()
        self._open = True

    def fileno(self) -> int:
        return self._descriptor

    def wake(self) -> None:
        with self._lock:
            # The number may belong to another file once it is closed.
            if self._open:
                os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        os.eventfd_read(self._descriptor)

    def close(self) -> None:
        with self._lock:
            self._open = False
            os.close(self._descriptor)
