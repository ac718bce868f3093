"""openpi's side of its WebSocket protocol, frame by frame."""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)

from phalanx.wire.msgpack_numpy import pack, unpack


class Rejected(Exception):
    """The handshake was refused; its status and body."""


class OpenpiConnection:
    """Connected when built, with the server's metadata read."""

    def __init__(self, url: str, headers: dict[str, str] | None = None) -> None:
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname, parts.port))
        self._ws = WSConnection(ConnectionType.CLIENT)
        self._pending: list[Any] = []
        extra = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        request = Request(host=parts.netloc, target="/", extra_headers=extra)
        self._socket.sendall(self._ws.send(request))
        event = self._event()
        if isinstance(event, RejectConnection):
            body = b""
            while not isinstance(event, RejectData) or not event.body_finished:
                event = self._event()
                body += event.data
            self._socket.close()
            raise Rejected(body.decode())
        assert isinstance(event, AcceptConnection)
        self.metadata = unpack(self.receive())

    def infer(self, observation: dict[str, Any]) -> Any:
        """The decoded answer, or the text of an error."""
        self.send(pack(observation))
        return self.answer()

    def answer(self) -> Any:
        frame = self.receive()
        return frame if isinstance(frame, str) else unpack(frame)

    def send(self, frame: bytes | str) -> None:
        kind = TextMessage if isinstance(frame, str) else BytesMessage
        self.write(self._ws.send(kind(data=frame)))

    def frame(self, data: bytes) -> bytes:
        """The bytes that `send` would write."""
        return self._ws.send(BytesMessage(data=data))

    def write(self, data: bytes) -> None:
        self._socket.sendall(data)

    def receive(self) -> bytes | str:
        parts = []
        while True:
            event = self._event()
            if isinstance(event, CloseConnection):
                raise ConnectionError(event.code, event.reason)
            parts.append(event.data)
            if event.message_finished:
                return (b"" if isinstance(event, BytesMessage) else "").join(parts)

    def close(self) -> None:
        self._socket.close()

    def _event(self) -> Any:
        while not self._pending:
            data = self._socket.recv(65536)
            if not data:
                raise ConnectionError("the server closed the connection")
            self._ws.receive_data(data)
            self._pending = list(self._ws.events())
        return self._pending.pop(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
