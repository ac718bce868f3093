"""Reads requests from a client's bytes, one after another, and refuses what is not HTTP/1.

The parser is llhttp's, strict; what it does not check (sizes, repeated fields, the host) is checked
here. A large body passes it by: between its head and its end there is nothing to parse.
"""

from __future__ import annotations

from collections import deque

import httptools

from phalanx.gateway.http.fields import SINGLE, misnamed_by_connection, named_by_connection
from phalanx.gateway.http.incoming_request import Bytes, IncomingRequest, WholeRequest
from phalanx.gateway.http.limits import HELD_BYTES, HttpLimits
from phalanx.gateway.http.refusal import Refusal
from phalanx.gateway.http.whole_message import KnownHeads

_LARGE = 16 * 1024
"""From this size on a read is split after its head, so that the body is not copied by the parser."""


class RequestReader:
    """`waiting` holds the requests in their order; whoever answers one removes it.

    After a refusal nothing further is read (`stopped`). After a request to become a WebSocket
    (`switching`) what follows is no HTTP, and is kept in `tail`. Whoever feeds it stops where
    it is `crowded`.
    """

    def __init__(self, limits: HttpLimits, heads: KnownHeads) -> None:
        self._limits = limits
        self._heads = heads
        # What could be above a limit is measured while it is parsed.
        self._max_glance = min(limits.max_head_bytes, limits.max_body_bytes)
        self.waiting: deque[IncomingRequest] = deque()
        self.tail = bytearray()
        self.stopped = False
        self.switching = False
        self._current = IncomingRequest()
        self._begun = False
        self._head_bytes = 0
        self._num_parsing = 0
        self._skip = 0
        self._parser = httptools.HttpRequestParser(self)

    @property
    def in_head(self) -> bool:
        """Whether a request has begun whose head is not whole."""
        return self._begun and not self._current.head_done

    @property
    def in_body(self) -> bool:
        """Whether the rest of a request's body is still to come."""
        return self._begun and self._current.head_done

    @property
    def crowded(self) -> bool:
        """Whether so much waits to be answered that no more should be read."""
        waiting = self.waiting
        if len(waiting) > self._limits.max_pipelined or len(self.tail) > HELD_BYTES:
            return True
        return len(waiting) > 1 and waiting[-1].num_bytes > HELD_BYTES

    def take_tail(self) -> bytes:
        """What has come after a request for another protocol, once."""
        tail = bytes(self.tail)
        self.tail.clear()
        return tail

    def feed(self, data: bytes) -> None:
        """Read on. What follows a refusal is dropped."""
        if self.switching:
            self.tail += data
        elif self._begun:
            self._go_on(data)
        elif not self.stopped:
            whole = self._heads.request(data) if len(data) <= self._max_glance else None
            if whole is not None:
                self.waiting.append(WholeRequest(*whole))
            else:
                self._begin(data)

    def _begin(self, data: bytes) -> None:
        """Read from the beginning of a request, or of what is none."""
        end = data.find(b"\r\n\r\n") + 4 if len(data) >= _LARGE else 0
        if end < 4:
            self._go_on(data)
            return
        self._parse(data[:end])
        if self.switching:
            self.tail += data[end:]
            return
        rest: Bytes = memoryview(data)[end:]
        if self._rest_is_large():
            rest = self._pass_by(rest)
        if rest:
            self._go_on(rest)

    def _go_on(self, data: Bytes) -> None:
        if self._skip:
            data = self._pass_by(data)
        if not data or self.stopped:
            return
        self._parse(data)
        if self._begun and not self._current.head_done:
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.max_head_bytes:
                self._stop(self._current, _long_head(self._limits.max_head_bytes))
        elif self._begun:
            self._rest_is_large()

    def _parse(self, data: Bytes) -> None:
        self._num_parsing = len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._switch(bytes(data[upgrade.args[0] :]))
        except httptools.HttpParserError as error:
            if not self.stopped:
                self._stop(self._current, Refusal(400, "malformed_request", f"not HTTP: {error}"))

    def _switch(self, tail: bytes) -> None:
        """Bytes after a request that asked for another protocol: it is WebSocket, or not obeyed."""
        if self._current.upgrade:
            self.switching = True
            self.tail += tail
        elif not self.stopped:
            self._parser = httptools.HttpRequestParser(self)
            if self._begun:
                # The parser takes a body for the other protocol's beginning.
                self._skip = self._current.content_length
            if tail:
                self._go_on(tail)

    def _stop(self, request: IncomingRequest, refusal: Refusal) -> None:
        if request.complete or not self.waiting or self.waiting[-1] is not request:
            request = IncomingRequest()
            self.waiting.append(request)
        request.refusal = refusal
        self.stopped = True

    # Called by the parser.

    def on_message_begin(self) -> None:
        if self.stopped:
            return
        self._begun = True
        self._head_bytes = 0
        self._current = request = IncomingRequest()
        self.waiting.append(request)

    def on_url(self, part: bytes) -> None:
        self._current.target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        # After the head these are a chunked body's trailers, which are not passed on.
        if not self._current.head_done:
            self._current.add(name, value)

    def on_headers_complete(self) -> None:
        if self.stopped:
            return
        request = self._current
        parser = self._parser
        request.head_done = True
        request.method = parser.get_method().decode("ascii")
        request.http11 = parser.get_http_version() == "1.1"
        request.keep_alive = parser.should_keep_alive()
        refusal = self._checked(request)
        if refusal is not None:
            self._stop(request, refusal)

    def on_body(self, part: bytes) -> None:
        self._add(part)

    def on_message_complete(self) -> None:
        if self._current.num_bytes >= self._current.content_length:
            self._current.complete = True
            self._begun = False

    # The checks of a head.

    def _checked(self, request: IncomingRequest) -> Refusal | None:
        fields = dict(request.pairs)
        if len(fields) != len(request.pairs):
            refusal = _repeated(request, fields)
            if refusal is not None:
                return refusal
        if len(request.pairs) > self._limits.max_fields:
            return _too_many(self._limits.max_fields)
        if self._is_long(request):
            return _long_head(self._limits.max_head_bytes)
        if b"host" not in fields and request.http11:
            return Refusal(400, "malformed_request", "an HTTP/1.1 request needs a `host` field")
        if not request.target.startswith(b"/"):
            refusal = _absolute(request)
            if refusal is not None:
                return refusal
        request.path = request.target.partition(b"?")[0].decode("latin-1")
        request.start_line = b"%b %b HTTP/1.1\r\n" % (request.method.encode(), request.target)
        if b"connection" in fields:
            refusal = _connection(request, fields)
            if refusal is not None:
                return refusal
        return self._framing(request, fields)

    def _is_long(self, request: IncomingRequest) -> bool:
        limit = self._limits.max_head_bytes
        if self._head_bytes + self._num_parsing <= limit:
            return False
        size = sum(len(name) + len(value) + 4 for name, value in request.pairs)
        return size + len(request.target) > limit

    def _framing(self, request: IncomingRequest, fields: dict[bytes, bytes]) -> Refusal | None:
        coding = fields.get(b"transfer-encoding")
        if coding is not None:
            if coding.lower() != b"chunked" or not request.http11:
                coding_text = coding.decode("latin-1")
                message = f"transfer-encoding {coding_text!r}: only chunked, over HTTP/1.1"
                return Refusal(501, "unsupported_encoding", message)
            request.chunked = True
        length = fields.get(b"content-length")
        if length is not None:
            request.content_length = int(length)
            limit = self._limits.max_body_bytes
            if request.content_length > limit:
                return _too_large(f"{request.content_length} bytes", limit)
        expected = fields.get(b"expect")
        if expected is not None and expected.lower() != b"100-continue":
            message = f"expect: {expected.decode('latin-1')!r}; only 100-continue is known"
            return Refusal(417, "expectation_failed", message)
        if b"upgrade" in fields and (request.chunked or (request.upgrade and request.has_body)):
            return Refusal(400, "malformed_request", "a request to upgrade cannot have this body")
        request.awaits_continue = expected is not None and request.http11
        return None

    # Bodies.

    def _add(self, part: Bytes) -> None:
        request = self._current
        if request.refusal is not None:
            return
        request.num_bytes += len(part)
        limit = self._limits.max_body_bytes
        if request.num_bytes > limit:
            self._stop(request, _too_large(f"more than {limit} bytes", limit))
            return
        request.parts.append(part)

    def _rest_is_large(self) -> bool:
        """Whether the rest of a body of known length passes the parser by from now on."""
        request = self._current
        if self._begun and request.head_done and not self.stopped:
            rest = request.content_length - request.num_bytes
            if rest >= _LARGE:
                self._skip = rest
                # This one would wait for the body; the next request is read by another.
                self._parser = httptools.HttpRequestParser(self)
        return self._skip > 0

    def _pass_by(self, data: Bytes) -> Bytes:
        """Take the body's share of `data`, and return the rest."""
        if len(data) < self._skip:
            self._skip -= len(data)
            self._add(data)
            return b""
        end = self._skip
        self._skip = 0
        self._add(data[:end])
        self.on_message_complete()
        return data[end:]


def _long_head(limit: int) -> Refusal:
    return Refusal(431, "head_too_large", f"the request's head is above {limit} bytes")


def _too_large(size: str, limit: int) -> Refusal:
    message = f"the body has {size}; at most {limit} are allowed; send less at once"
    return Refusal(413, "body_too_large", message)


def _too_many(limit: int) -> Refusal:
    return Refusal(431, "head_too_large", f"the request has more than {limit} header fields")


def _connection(request: IncomingRequest, fields: dict[bytes, bytes]) -> Refusal | None:
    """What the request says about this connection alone."""
    request.also_dropped = named_by_connection(fields[b"connection"])
    misnamed = misnamed_by_connection(request.also_dropped)
    if misnamed:
        message = f"the field `connection` names `{misnamed}`, which is not for one hop"
        return Refusal(400, "malformed_request", message)
    if b"upgrade" in fields:
        request.upgrade = fields[b"upgrade"].lower() == b"websocket"
        # What follows is no HTTP, also where the upgrade is refused.
        request.keep_alive = request.keep_alive and not request.upgrade
    return None


def _absolute(request: IncomingRequest) -> Refusal | None:
    """Bring a target that names this host into the form that starts with a slash."""
    scheme, separator, rest = request.target.partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        target = request.target.decode("latin-1")
        return Refusal(400, "malformed_request", f"the target {target!r} is not a path")
    slash = rest.find(b"/")
    request.target = rest[slash:] if slash >= 0 else b"/"
    return None


def _repeated(request: IncomingRequest, fields: dict[bytes, bytes]) -> Refusal | None:
    names = [name for name, _ in request.pairs]
    for name in SINGLE:
        if names.count(name) > 1:
            message = f"the field `{name.decode()}` is there more than once"
            return Refusal(400, "malformed_request", message)
    if names.count(b"connection") > 1:
        values = [value for name, value in request.pairs if name == b"connection"]
        fields[b"connection"] = b", ".join(values)
    return None
