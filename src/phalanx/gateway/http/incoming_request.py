"""One request as it arrives from a client."""

from __future__ import annotations

from phalanx.gateway.http.fields import LAST_CHUNK, Pair, chunk, field_lines
from phalanx.gateway.http.refusal import Refusal
from phalanx.gateway.http.whole_message import KnownHead, is_json

NO_LENGTH = -1
NOTHING: frozenset[bytes] = frozenset()
Bytes = bytes | memoryview


class IncomingRequest:
    """`head_done`, then `parts` until `complete`. With `awaits_continue` they do not come before the
    client is asked for them. A request that cannot be served has a `refusal` instead of what is
    missing.

    Its fields are read by a parser, or are a block that is only looked into.
    """

    # Each request is asked for these dozens of times.
    __slots__ = (
        "_pairs",
        "_values",
        "also_dropped",
        "awaits_continue",
        "chunked",
        "complete",
        "content_length",
        "head_done",
        "http11",
        "keep_alive",
        "known",
        "method",
        "num_bytes",
        "parts",
        "path",
        "refusal",
        "start_line",
        "target",
        "upgrade",
    )

    def __init__(self) -> None:
        self.method = self.path = ""
        self.target = self.start_line = b""
        self.http11 = self.keep_alive = True
        self.upgrade = self.chunked = self.awaits_continue = False
        self.head_done = self.complete = False
        self.content_length = NO_LENGTH
        self.num_bytes = 0
        self.parts: list[Bytes] = []
        self.also_dropped = NOTHING
        self.refusal: Refusal | None = None
        self.known: KnownHead | None = None
        self._pairs: list[Pair] | None = None
        self._values: dict[bytes, bytes] | None = None

    def take(self) -> list[Bytes]:
        """The parts that have arrived since the last time."""
        parts = self.parts
        self.parts = []
        return parts

    def framed(self) -> list[Bytes]:
        """As `take`, framed as it goes on to a backend."""
        parts = self.take()
        if not self.chunked:
            return parts
        framed = chunk(parts, sum(map(len, parts))) if parts else []
        if self.complete:
            framed.append(LAST_CHUNK)
        return framed

    @property
    def has_body(self) -> bool:
        return self.chunked or self.content_length > 0

    @property
    def pairs(self) -> list[Pair]:
        """All fields in their order, names in lower case; the last one is the length, if there is
        one.
        """
        if self._pairs is None:
            self._pairs = []
            if self.known is not None:
                self._pairs = self.known.fields.pairs()
                if self.content_length >= 0:
                    self._pairs.append((b"content-length", b"%d" % self.content_length))
        return self._pairs

    def add(self, name: bytes, value: bytes) -> None:
        self.pairs.append((name.lower(), value.rstrip(b" \t")))

    def get(self, name: bytes) -> bytes | None:
        """The value of a field, the last where there are several."""
        if self._values is None:
            self._values = dict(self.pairs)
        return self._values.get(name)

    @property
    def is_json(self) -> bool:
        return is_json(self.get(b"content-type")) if self.known is None else self.known.is_json

    @property
    def model_field(self) -> bytes | None:
        return self.get(b"x-phalanx-model") if self.known is None else self.known.model

    @property
    def given_id(self) -> bytes | None:
        return self.get(b"x-request-id") if self.known is None else self.known.request_id

    @property
    def query(self) -> str:
        target = self.target if self.known is None else self.known.target
        return target.partition(b"?")[2].decode("latin-1")

    @property
    def start(self) -> bytes:
        """The first line as it came, with its end."""
        return self.start_line if self.known is None else self.known.start_line

    def onward(self, dropped: frozenset[bytes]) -> bytes:
        """The fields that go on to a backend; the length among them only where a parser has read
        them, and it is not dropped. A head that repeats is always asked for with the same `dropped`.
        """
        known = self.known
        if known is None:
            return b"".join(field_lines(self.pairs, dropped | self.also_dropped))
        if not known.onward:
            marks = frozenset(b"\n%b:" % name for name in dropped)
            known.onward = known.fields.without(marks)
        return known.onward


class WholeRequest(IncomingRequest):
    """One that came in one read."""

    __slots__ = ()

    def __init__(self, known: KnownHead, length: int, body: bytes) -> None:
        self.method = known.method
        self.path = known.path
        self.target = self.start_line = b""
        self.http11 = self.keep_alive = self.head_done = self.complete = True
        self.upgrade = self.chunked = self.awaits_continue = False
        self.content_length = length
        self.num_bytes = 0
        self.parts = [body] if body else []
        self.also_dropped = NOTHING
        self.refusal = None
        self.known = known
        self._pairs = self._values = None
