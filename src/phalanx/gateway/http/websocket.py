"""A WebSocket that a handler of the gateway talks to; fed by its connection, framed by wsproto.

Messages are whole, at most as large as the server's body limit, and at most a few are held: then
the client is not read from until the handler takes one. Nor is a client that does not read itself:
it would be owed ever more answers to its pings.
"""

from __future__ import annotations

import asyncio
from collections import deque

from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Event, Ping, TextMessage
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

MAX_HELD = 4
"""Messages that wait for the handler."""


class WebSocket:
    """One accepted connection."""

    def __init__(self, transport: asyncio.Transport, max_message_bytes: int) -> None:
        self._transport = transport
        self._max_message_bytes = max_message_bytes
        self._frames = Connection(ConnectionType.SERVER)
        self._held: deque[str | bytes] = deque()
        self._text: list[str] = []
        self._binary: list[bytes | bytearray] = []
        self._num_bytes = 0
        self._arrived = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._paused = False
        self._closed = False
        self._leaving = False

    async def receive(self) -> str | bytes | None:
        """The next message; None when no more will come: the client has gone, or the gateway is
        about to.
        """
        while not self._held and not self._closed and not self._leaving:
            self._arrived.clear()
            await self._arrived.wait()
        if not self._held:
            return None
        message = self._held.popleft()
        self._balance()
        return message

    async def send(self, message: str | bytes) -> None:
        """Returns when the client keeps up. Raises `ConnectionResetError` when it is gone."""
        event = (
            TextMessage(data=message) if isinstance(message, str) else BytesMessage(data=message)
        )
        if not self._closed:
            try:
                self._transport.write(self._frames.send(event))
            except LocalProtocolError:
                self._closed = True
        while not self._writable.is_set() and not self._closed:
            await self._writable.wait()
        if self._closed:
            raise ConnectionResetError("the WebSocket's client is gone")

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Say goodbye, once; what was sent before still goes out."""
        self.end(code, reason)

    def end(self, code: int = 1000, reason: str = "") -> None:
        """As `close`, for whoever runs the handler."""
        if not self._closed:
            self._end(code, reason)

    def leave(self) -> None:
        """The gateway stops: what has arrived is still handled, and no more is received."""
        self._leaving = True
        self._arrived.set()

    @property
    def leaving(self) -> bool:
        return self._leaving

    def feed(self, data: bytes) -> None:
        """Bytes from the client; called by its connection."""
        if self._closed:
            return
        try:
            self._frames.receive_data(data)
            for event in self._frames.events():
                self._take(event)
                if self._closed:
                    return
        except RemoteProtocolError as error:
            self._end(int(CloseReason.PROTOCOL_ERROR), str(error))

    def lost(self) -> None:
        """The client is gone; called by its connection."""
        self._closed = True
        self._arrived.set()
        self._writable.set()

    def pause_writing(self) -> None:
        self._writable.clear()
        self._balance()

    def resume_writing(self) -> None:
        self._writable.set()
        self._balance()

    def _take(self, event: Event) -> None:
        match event:
            case TextMessage(data=text, message_finished=whole):
                if text:
                    self._text.append(text)
                if self._fits(len(text)) and whole:
                    self._hold("".join(self._text))
            case BytesMessage(data=binary, message_finished=whole):
                if binary:
                    self._binary.append(binary)
                if self._fits(len(binary)) and whole:
                    self._hold(b"".join(self._binary))
            case Ping():
                self._transport.write(self._frames.send(event.response()))
            case CloseConnection():
                if self._frames.state is not ConnectionState.CLOSED:
                    self._transport.write(self._frames.send(event.response()))
                self.lost()
                self._transport.close()

    def _fits(self, num_bytes: int) -> bool:
        self._num_bytes += num_bytes
        if self._num_bytes <= self._max_message_bytes:
            return True
        limit = f"a message may have {self._max_message_bytes} bytes"
        self._end(int(CloseReason.MESSAGE_TOO_BIG), limit)
        return False

    def _hold(self, message: str | bytes) -> None:
        self._text.clear()
        self._binary.clear()
        self._num_bytes = 0
        self._held.append(message)
        self._arrived.set()
        self._balance()

    def _balance(self) -> None:
        """Read on, or not."""
        paused = len(self._held) >= MAX_HELD or not self._writable.is_set()
        if paused is self._paused or self._closed:
            return
        self._paused = paused
        if paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _end(self, code: int, reason: str) -> None:
        # A close frame has room for 123 bytes of words.
        words = reason.encode()[:120].decode(errors="ignore")
        self._transport.write(self._frames.send(CloseConnection(code=code, reason=words)))
        self.lost()
        self._transport.close()
