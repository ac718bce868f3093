"""Reads a message that one read has brought whole, without a parser's callbacks: most are such.

Only plain messages are taken: HTTP/1.1, a length or no body, no field more than once that routing,
framing or the connection depends on. All else is left to the parser, which also words what is wrong.
What is taken here the parser reads alike; a test compares the two.
"""

from __future__ import annotations

import re
from typing import TypeVar

from phalanx.gateway.http.fields import Pair
from phalanx.gateway.http.router import Route

T = TypeVar("T")

MAX_BYTES = 64 * 1024
"""Longer messages seldom come in one read, and are not copied again where they do."""
MAX_KNOWN = 512
_MAX_LINES = 64
_NO_LENGTH = -1
_MAX_DIGITS = 9
_LOWER = b"\r\ncontent-length: "
_TITLE = b"\r\nContent-Length: "
_FIELDS = rb"((?:[!#$%&'*+\-.^_`|~0-9A-Za-z]++:[^\x00-\x08\x0a-\x1f\x7f]*+\r\n)++)\r\n"
_REQUEST = re.compile(
    rb"((?:GET|POST|PUT|DELETE|PATCH|OPTIONS) (/[!-~]*+) HTTP/1\.1\r\n)" + _FIELDS
)
_RESPONSE = re.compile(rb"(HTTP/1\.1 ([2-5][0-9][0-9])(?: [ -~]*+)?\r\n)" + _FIELDS)
_NAMES = re.compile(
    rb"\n(?:host|authorization|content-type|content-length|x-request-id|x-phalanx-model|connection"
    rb"|x-inference-model|keep-alive|transfer-encoding|te|trailer|upgrade|expect|http2-settings|proxy-[^:]*):"
)
HOST = b"\nhost:"
AUTHORIZATION = b"\nauthorization:"
CONTENT_TYPE = b"\ncontent-type:"
CONTENT_LENGTH = b"\ncontent-length:"
REQUEST_ID = b"\nx-request-id:"
MODEL = b"\nx-phalanx-model:"
CONNECTION = b"\nconnection:"
_KNOWN = frozenset({HOST, AUTHORIZATION, CONTENT_TYPE, REQUEST_ID, MODEL, CONNECTION})
RESPONSE_DROPPED = frozenset({REQUEST_ID, CONNECTION})
_PAIR = re.compile(rb"\n([^:]+):[ \t]*([^\r]*)")


class FieldBlock:
    """The lines of a message's fields as they came; `names` are those that the gateway knows, each
    between a line's end and its colon.
    """

    __slots__ = ("_block", "_low", "names")

    def __init__(self, block: bytes, names: list[bytes], low: bytes) -> None:
        self._block = block
        self._low = low  # begins with a line's end, so that a name is found behind one
        self.names = names

    def get(self, name: bytes) -> bytes | None:
        """The value of a field whose name is one of `names`."""
        start = self._low.find(name)
        if start < 0:
            return None
        start += len(name) - 1
        return self._block[start : self._block.find(b"\r", start)].strip(b" \t")

    def without(self, dropped: frozenset[bytes]) -> bytes:
        """The lines but for those fields."""
        block, low = self._block, self._low
        for name in self.names:
            if name in dropped:
                start = low.find(name)
                end = low.find(b"\n", start + 1)
                block = block[:start] + block[end:]
                low = low[:start] + low[end:]
        return block

    def pairs(self) -> list[Pair]:
        found = _PAIR.findall(b"\n" + self._block)
        return [(name.lower(), value.rstrip(b" \t")) for name, value in found]


class KnownHead:
    """The head of a request, without its length. Heads repeat: what follows from one is kept with
    it. `route` and `onward`, the fields that go on, are set by those who find them out.
    """

    __slots__ = (
        "fields",
        "has_query",
        "is_json",
        "method",
        "model",
        "onward",
        "path",
        "request_id",
        "route",
        "start_line",
        "target",
    )

    def __init__(self, start_line: bytes, target: bytes, fields: FieldBlock) -> None:
        self.start_line = start_line
        self.target = target
        self.has_query = b"?" in target
        self.fields = fields
        self.method = start_line[: start_line.index(b" ")].decode()
        self.path = target.partition(b"?")[0].decode("latin-1")
        self.is_json = is_json(fields.get(CONTENT_TYPE))
        self.model = fields.get(MODEL)
        self.request_id = fields.get(REQUEST_ID)
        self.route: Route | None = None
        self.onward = b""


def is_json(content_type: bytes | None) -> bool:
    if content_type is None:
        return False
    media = content_type.partition(b";")[0].strip().lower()
    return media == b"application/json" or media.endswith(b"+json")


class KnownHeads:
    """The latest heads by their bytes, so that one that repeats is read once. What is found is
    equal to what was sent, byte for byte, but for the length.
    """

    def __init__(self) -> None:
        self._requests: dict[bytes, KnownHead] = {}
        self._responses: dict[bytes, tuple[int, bytes]] = {}
        # The same with their lengths: seldom more of them than there are heads by far.
        self._whole_requests: dict[bytes, tuple[KnownHead, int]] = {}
        self._whole_responses: dict[bytes, tuple[int, bytes, int]] = {}

    def request(self, data: bytes) -> tuple[KnownHead, int, bytes] | None:
        """A request's head, its length (-1: it tells none) and its body; None where it is not plain
        or not whole.
        """
        end = data.find(b"\r\n\r\n") + 4
        if end < 4 or len(data) > MAX_BYTES:
            return None
        whole = data[:end]
        found = self._whole_requests.get(whole)
        if found is None:
            found = self._new_request(whole)
            if found is None:
                return None
            _keep(self._whole_requests, whole, found)
        known, length = found
        if len(data) - end != (length if length >= 0 else 0):
            return None
        return known, length, data[end:]

    def response(self, data: bytes) -> tuple[int, bytes, bytes] | None:
        """A response's status, its lines as they go on, and its body; None as for a request."""
        end = data.find(b"\r\n\r\n") + 4
        if end < 4 or len(data) > MAX_BYTES:
            return None
        whole = data[:end]
        found = self._whole_responses.get(whole)
        if found is None:
            found = self._new_response(whole)
            if found is None:
                return None
            _keep(self._whole_responses, whole, found)
        status, lines, length = found
        return (status, lines, data[end:]) if len(data) - end == length else None

    def _new_request(self, whole: bytes) -> tuple[KnownHead, int] | None:
        split = _split(whole)
        if split is None:
            return None
        head, length = split
        known = self._requests.get(head)
        if known is None:
            known = _request(head)
            if known is None:
                return None
            _keep(self._requests, head, known)
        return known, length

    def _new_response(self, whole: bytes) -> tuple[int, bytes, int] | None:
        split = _split(whole)
        if split is None or split[1] < 0:
            return None
        head, length = split
        known = self._responses.get(head)
        if known is None:
            found = _RESPONSE.fullmatch(head)
            fields = None if found is None else _fields(found.group(3))
            if found is None or fields is None or found.group(2) in (b"204", b"304"):
                return None
            known = int(found.group(2)), found.group(1) + fields.without(RESPONSE_DROPPED)
            _keep(self._responses, head, known)
        return known[0], b"%bcontent-length: %d" % (known[1], length), length


def _split(head: bytes) -> tuple[bytes, int] | None:
    """A head without its length, and the length; None where that is not a plain number."""
    start = head.find(_LOWER)
    if start < 0:
        start = head.find(_TITLE)
        if start < 0:  # or it is written in another way, which is then found among the names
            return head, _NO_LENGTH
    stop = head.find(b"\r", start + 2)
    digits = head[start + len(_LOWER) : stop]
    if not digits.isdigit() or len(digits) > _MAX_DIGITS:
        return None
    return head[:start] + head[stop:], int(digits)


def _request(head: bytes) -> KnownHead | None:
    found = _REQUEST.fullmatch(head)
    fields = None if found is None else _fields(found.group(3))
    if found is None or fields is None or HOST not in fields.names:
        return None
    return KnownHead(found.group(1), found.group(2), fields)


def _keep(heads: dict[bytes, T], head: bytes, known: T) -> None:
    if len(heads) >= MAX_KNOWN:
        heads.clear()
    heads[head] = known


def _fields(block: bytes) -> FieldBlock | None:
    if block.count(b"\n") > _MAX_LINES:
        return None
    low = b"\n" + block.lower()
    names = _NAMES.findall(low)
    if not _KNOWN.issuperset(names) or len(set(names)) != len(names):
        return None
    if CONNECTION in names and b"\nconnection: keep-alive\r" not in low:
        return None
    return FieldBlock(block, names, low)
