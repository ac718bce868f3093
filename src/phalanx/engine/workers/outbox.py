"""What goes to one worker. Putting never waits: what its socket does not take waits here."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence

from phalanx.engine.workers.packets import PacketSocket, close_all, is_full


class Outbox:
    """Sends in order through a socket that does not wait; safe to use from any thread.

    Packets for a worker that is gone are dropped: the end of what it sent tells of its death.
    """

    def __init__(self, sock: PacketSocket) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._backlog: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._closed = False

    @property
    def wants_write(self) -> bool:
        """Whether packets wait for the socket to be writable."""
        return bool(self._backlog)

    def put(self, body: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a packet now or later; the descriptors stay the caller's."""
        with self._lock:
            if self._closed:
                return
            if self._backlog or not self._send(body, descriptors):
                self._backlog.append((body, tuple(os.dup(each) for each in descriptors)))

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it."""
        with self._lock:
            while self._backlog and self._send(*self._backlog[0]):
                close_all(self._backlog.popleft()[1])

    def close(self) -> None:
        """Drop what waits and send nothing more."""
        with self._lock:
            self._closed = True
            while self._backlog:
                close_all(self._backlog.popleft()[1])

    def _send(self, body: bytes, descriptors: Sequence[int]) -> bool:
        """False where the socket is full."""
        try:
            self._socket.send(body, descriptors)
        except (BrokenPipeError, ConnectionResetError):
            return True
        except OSError as error:
            if not is_full(error):
                raise
            return False
        return True
