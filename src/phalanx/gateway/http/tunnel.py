"""Joins a client and a backend that have left HTTP: what one sends the other gets, byte for byte."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from phalanx.routing.load import Countable, Ticket


class _End(asyncio.Protocol):
    """Reads from one side and writes to the other."""

    def __init__(self, own: asyncio.Transport, other: asyncio.Transport, tunnel: Tunnel) -> None:
        self._own = own
        self._other = other
        self._tunnel = tunnel

    def data_received(self, data: bytes) -> None:
        self._other.write(data)

    def pause_writing(self) -> None:
        if not self._other.is_closing():
            self._other.pause_reading()

    def resume_writing(self) -> None:
        if not self._other.is_closing():
            self._other.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._tunnel.ended()


class Tunnel:
    """Holds its ticket until either side is gone; the other is then closed, after what it was sent.

    `on_end` is called once, then.
    """

    def __init__(
        self,
        client: asyncio.Transport,
        backend: asyncio.Transport,
        ticket: Ticket[Countable],
        on_end: Callable[[], None],
    ) -> None:
        self._client = client
        self._backend = backend
        self._ticket = ticket
        self._ended = False
        self._on_end = on_end

    def open(self, early: bytes) -> None:
        """Begin; `early` is what the client has sent already."""
        client, backend = self._client, self._backend
        client.set_protocol(_End(client, backend, self))
        backend.set_protocol(_End(backend, client, self))
        client.resume_reading()  # before the backend may say that it has enough
        if early:
            backend.write(early)

    def ended(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._ticket.release()
        self.close()
        self._on_end()

    def close(self) -> None:
        """End both sides after what they were sent."""
        self._client.close()
        self._backend.close()

    def abort(self) -> None:
        if self._ended:
            return
        self._client.abort()
        self._backend.abort()
