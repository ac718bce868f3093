"""One connection to an HTTP backend: carries one exchange after another, never two at once."""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

import httptools

from phalanx.gateway.http.deadline import Deadline
from phalanx.gateway.http.fields import Pair, misnamed_by_connection, named_by_connection
from phalanx.gateway.http.incoming_request import Bytes
from phalanx.gateway.http.whole_message import KnownHeads

_LARGE = 16 * 1024
_NO_LENGTH = -1


class Exchanging(Protocol):
    """The request that a connection carries, as the connection sees it."""

    def response(self, upstream: Upstream) -> None:
        """More of the response is in `upstream`; `upstream.complete` tells its end."""
        ...

    def whole_response(self, upstream: Upstream, status: int, lines: bytes, body: bytes) -> None:
        """All of it at once: the lines that go on, without the end of the head, and the body."""
        ...

    def interim(self, status: int, headers: list[Pair]) -> None: ...
    def switched(self, tail: bytes) -> None:
        """The backend has agreed to change the protocol; `tail` are its first bytes."""
        ...

    def broken(self, why: str) -> None:
        """Nothing more will come of this connection."""
        ...

    def late(self) -> None:
        """The backend has sent nothing for too long."""
        ...

    def pause_upload(self) -> None: ...
    def resume_upload(self) -> None: ...


class Idle(Protocol):
    """Where a connection waits between exchanges."""

    def dropped(self, upstream: Upstream) -> None: ...


class Upstream(asyncio.Protocol):
    """`head_done`, `status`, `headers`, and `parts` since they were last taken, of the response.

    `reusable` says, once it is `complete`, whether the connection can carry another exchange.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, key: str, idle: Idle, heads: KnownHeads
    ) -> None:
        self._heads = heads
        self.key = key
        self.transport: asyncio.Transport
        self.lost = False
        self._loop = loop
        self._rests_since_s = loop.time()
        self._idle = idle
        self._exchange: Exchanging | None = None
        self._deadline = Deadline(loop, self._late)
        self._parser = httptools.HttpResponseParser(self)
        self._surplus = False
        self._without_body = False
        self._begin()

    def _begin(self) -> None:
        self._dirty = False  # nothing of a response was read piece by piece
        self.head_done = False
        self.complete = False
        self.reusable = False
        self.status = 0
        self.headers: list[Pair] = []
        self.fields: dict[bytes, bytes] = {}
        self.parts: list[Bytes] = []
        self.chunked = False
        self.content_length = _NO_LENGTH
        self._misnamed = ""
        self._num_bytes = 0
        self._skip = 0

    # What an exchange does.

    def carry(self, exchange: Exchanging, *, without_body: bool, within_s: float) -> None:
        """The request that is about to be written is this one's; `without_body`: it is a `HEAD`."""
        self._exchange = exchange
        if self._dirty:
            self._begin()
        self._without_body = without_body
        self._deadline.set(within_s)

    def expect_more(self, within_s: float) -> None:
        """The next piece has to come in time."""
        self._deadline.set(within_s)

    def take(self) -> list[Bytes]:
        parts = self.parts
        self.parts = []
        return parts

    def rest(self, for_s: float) -> None:
        """The exchange is over; wait for another, but not too long."""
        self._exchange = None
        self._rests_since_s = self._deadline.set(for_s)

    def rested_s(self) -> float:
        return self._loop.time() - self._rests_since_s

    def abort(self) -> None:
        """Cut it, which tells the backend that nobody waits any more."""
        self._exchange = None
        self._deadline.close()
        self.transport.abort()

    def detach(self) -> None:
        """The connection changes its protocol: another object reads from now on."""
        self._exchange = None
        self._deadline.close()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of this class and not its name.
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            self._idle.dropped(self)  # an idle backend has nothing to say
            self.abort()
            return
        if not self._dirty and not self._without_body:
            whole = self._heads.response(data)
            if whole is not None:
                status, lines, body = whole
                exchange.whole_response(self, status, lines, body)
                return
        self._dirty = True
        self._in_pieces(exchange, data)

    def _in_pieces(self, exchange: Exchanging, data: bytes) -> None:
        rest: Bytes = self._pass_by(data) if self._skip else data
        if rest:
            try:
                self._feed(rest)
            except httptools.HttpParserUpgrade as upgrade:
                exchange.switched(bytes(rest[upgrade.args[0] :]))
                return
            except httptools.HttpParserError as error:
                if not self.complete:
                    self._break(f"sent what is not HTTP: {error}")
                    return
                self._surplus = True
        if self.status == 101:
            self._break("changed the protocol without being asked to")
        elif self._misnamed:
            self._break(f"sent a `connection` that names `{self._misnamed}`")
        elif self.head_done:
            if self._surplus:
                self.reusable = False
            exchange.response(self)

    def eof_received(self) -> bool:
        if self._exchange is not None and self._ends_with_connection():
            self.complete = True
            self._exchange.response(self)
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        self._deadline.close()
        self._idle.dropped(self)
        self._break("closed the connection" if error is None else f"broke it: {error}")

    def pause_writing(self) -> None:
        if self._exchange is not None:
            self._exchange.pause_upload()

    def resume_writing(self) -> None:
        if self._exchange is not None:
            self._exchange.resume_upload()

    # Called by the parser.

    def on_message_begin(self) -> None:
        if self.complete:
            self._surplus = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.head_done:
            self.headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        if self.complete:
            return
        parser = self._parser
        self.status = status = parser.get_status_code()
        if status < 200:
            return
        self.head_done = True
        self.reusable = parser.should_keep_alive()
        fields = self.fields = dict(self.headers)
        if b"connection" in fields:
            # Said more than once, each has to be looked at.
            told = b",".join(value for name, value in self.headers if name == b"connection")
            fields[b"connection"] = told
            self._misnamed = misnamed_by_connection(named_by_connection(told))
        self.chunked = b"transfer-encoding" in fields
        length = fields.get(b"content-length")
        if length is not None:
            self.content_length = int(length)
        if self._without_body or status in (204, 304):
            self.complete = True

    def on_body(self, part: bytes) -> None:
        if self.complete:
            self._surplus = True
        else:
            self._num_bytes += len(part)
            self.parts.append(part)

    def on_message_complete(self) -> None:
        if self.head_done:
            self.complete = True
        elif self._exchange is not None and self.status != 101:
            self._exchange.interim(self.status, self.headers)
            self.headers = []

    # Parts of it.

    def _feed(self, data: Bytes) -> None:
        if len(data) >= _LARGE and not self.head_done and isinstance(data, bytes):
            end = data.find(b"\r\n\r\n") + 4
            if end >= 4:
                self._parser.feed_data(data[:end])
                data = memoryview(data)[end:]
        if self._passes_by():
            data = self._pass_by(data)
        if data:
            self._parser.feed_data(data)
            self._passes_by()
        if self._without_body and self.complete:
            # To a parser the length that `HEAD` tells is a body to come.
            self._parser = httptools.HttpResponseParser(self)

    def _passes_by(self) -> bool:
        """Whether the rest of a body of known length passes the parser by from now on."""
        if self.head_done and not self.complete and not self.chunked:
            rest = self.content_length - self._num_bytes
            if rest >= _LARGE:
                self._skip = rest
                self._parser = httptools.HttpResponseParser(self)
        return self._skip > 0

    def _pass_by(self, data: Bytes) -> Bytes:
        if len(data) < self._skip:
            self._skip -= len(data)
            self._num_bytes += len(data)
            self.parts.append(data)
            return b""
        end = self._skip
        self._skip = 0
        self.parts.append(data[:end])
        self.complete = True
        return data[end:]

    def _ends_with_connection(self) -> bool:
        return (
            self.head_done
            and not self.complete
            and not self.chunked
            and self.content_length == _NO_LENGTH
        )

    def _break(self, why: str) -> None:
        exchange = self._exchange
        if exchange is not None:
            self._exchange = None
            exchange.broken(why)

    def _late(self) -> None:
        if self._exchange is not None:
            self._exchange.late()
        else:
            self._idle.dropped(self)
            self.abort()
