"""One request as it arrives from a client."""

from __future__ import annotations

from phalanx.gateway.http.fields import Pair, field_lines
from phalanx.gateway.http.refusal import Refusal
from phalanx.gateway.http.whole_message import FieldBlock

NO_LENGTH = -1
NOTHING: frozenset[bytes] = frozenset()
Bytes = bytes | memoryview


class IncomingRequest:
    """`head_done`, then `parts` until `complete`. With `awaits_continue` they do not come before the
    client is asked for them. A request that cannot be served has a `refusal` instead of what is
    missing.

    Its fields are read by a parser, or are a block that is only looked into.
    """

    method = ""
    path = ""
    target = b""
    start_line = b""
    http11 = True
    keep_alive = True
    upgrade = False
    chunked = False
    content_length = NO_LENGTH
    num_bytes = 0
    head_done = False
    complete = False
    awaits_continue = False
    also_dropped = NOTHING
    refusal: Refusal | None = None
    _pairs: list[Pair] | None = None
    _values: dict[bytes, bytes] | None = None
    _block: FieldBlock | None = None

    def __init__(self) -> None:
        self.parts: list[Bytes] = []

    @classmethod
    def whole(
        cls, start_line: bytes, target: bytes, fields: FieldBlock, body: bytes
    ) -> IncomingRequest:
        """One that came in one read."""
        request = cls()
        request.start_line = start_line
        request.target = target
        request.method = start_line[: start_line.index(b" ")].decode()
        request.path = target.partition(b"?")[0].decode("latin-1")
        request._block = fields
        request.head_done = request.complete = True
        if body:
            request.parts.append(body)
            request.num_bytes = request.content_length = len(body)
        return request

    def take(self) -> list[Bytes]:
        """The parts that have arrived since the last time."""
        parts = self.parts
        self.parts = []
        return parts

    @property
    def has_body(self) -> bool:
        return self.chunked or self.content_length > 0

    @property
    def pairs(self) -> list[Pair]:
        """All fields in their order, names in lower case."""
        if self._pairs is None:
            self._pairs = [] if self._block is None else self._block.pairs()
        return self._pairs

    def add(self, name: bytes, value: bytes) -> None:
        self.pairs.append((name.lower(), value))

    def get(self, name: bytes) -> bytes | None:
        """The value of one of the fields that the gateway knows, as `whole_message` names it."""
        if self._block is not None:
            return self._block.get(name)
        if self._values is None:
            self._values = dict(self.pairs)
        return self._values.get(name[1:-1])

    def lines(self, dropped: frozenset[bytes], marks: frozenset[bytes]) -> bytes:
        """The fields as they go on, without those `dropped`, which are `marks` to a block."""
        if self._block is not None:
            return self._block.without(marks)
        return b"".join(field_lines(self.pairs, dropped | self.also_dropped))
