"""How long one exchange may take, whatever comes of it in between."""

from __future__ import annotations

import socket

from phalanx.clock import Clock


class Deadline:
    """`total_s` from now on, of which no more than `silence_s` at a time may pass without a byte."""

    def __init__(self, clock: Clock, total_s: float, silence_s: float) -> None:
        self._clock = clock
        self._total_s = total_s
        self._silence_s = silence_s
        self._end_s = clock.monotonic_s() + total_s

    def limit(self, connection: socket.socket) -> None:
        """Let the connection's next call take no longer; raises `TimeoutError` once it is over."""
        left_s = self._end_s - self._clock.monotonic_s()
        if left_s <= 0:
            raise TimeoutError(f"it took longer than {self._total_s:g} s")
        connection.settimeout(min(left_s, self._silence_s))
