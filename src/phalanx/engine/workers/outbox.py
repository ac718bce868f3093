"""What goes to one worker. Putting never waits: what its socket does not take waits here."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from phalanx.engine.workers.packets import Descriptor, PacketSocket, is_temporary


class Outbox:
    """Sends in order through a socket that does not wait; safe to use from any thread.

    Packets for a worker that is gone are dropped: the end of what it sent tells of its death.
    """

    def __init__(self, sock: PacketSocket) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._backlog: deque[tuple[bytes, Sequence[Descriptor]]] = deque()
        self._closed = False

    @property
    def wants_write(self) -> bool:
        """Whether packets wait for the socket to be writable."""
        return bool(self._backlog)

    def put(self, body: bytes, descriptors: Sequence[Descriptor] = ()) -> None:
        """Send a packet now or later, holding its descriptors till then."""
        with self._lock:
            if self._closed:
                return
            if self._backlog or not self._send(body, descriptors):
                self._backlog.append((body, descriptors))

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it."""
        with self._lock:
            while self._backlog and self._send(*self._backlog[0]):
                self._backlog.popleft()

    def close(self) -> None:
        """Drop what waits and send nothing more."""
        with self._lock:
            self._closed = True
            self._backlog.clear()

    def _send(self, body: bytes, descriptors: Sequence[Descriptor]) -> bool:
        """False where it must be sent later."""
        try:
            self._socket.send(body, descriptors)
        except (BrokenPipeError, ConnectionResetError):
            return True
        except OSError as error:
            if not is_temporary(error):
                raise
            return False
        return True
