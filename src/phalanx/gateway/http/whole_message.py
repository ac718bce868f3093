"""Reads a message that one read has brought whole, without a parser's callbacks: most are such.

Only plain messages are taken: HTTP/1.1, a length or no body, no field but once that routing, framing
or the connection depends on. All else is left to the parser, which also words what is wrong. What is
taken here the parser reads alike; a test compares the two.
"""

from __future__ import annotations

import re

from phalanx.gateway.http.fields import Pair

MAX_BYTES = 64 * 1024
"""Longer messages seldom come in one read, and are not copied again where they do."""
_MAX_DIGITS = 9
_FIELDS = rb"((?:[!#$%&'*+\-.^_`|~0-9A-Za-z]++:[^\x00-\x08\x0a-\x1f\x7f]*+\r\n)++)\r\n"
_REQUEST = re.compile(
    rb"((?:GET|POST|PUT|DELETE|PATCH|OPTIONS) (/[!-~]*+) HTTP/1\.1\r\n)" + _FIELDS
)
_RESPONSE = re.compile(rb"(HTTP/1\.1 ([2-5][0-9][0-9])(?: [ -~]*+)?\r\n)" + _FIELDS)
_NAMES = re.compile(
    rb"\n(?:host|authorization|content-type|content-length|x-request-id|x-phalanx-model|connection"
    rb"|keep-alive|transfer-encoding|te|trailer|upgrade|expect|http2-settings|proxy-[^:]*):"
)
HOST = b"\nhost:"
AUTHORIZATION = b"\nauthorization:"
CONTENT_TYPE = b"\ncontent-type:"
CONTENT_LENGTH = b"\ncontent-length:"
REQUEST_ID = b"\nx-request-id:"
MODEL = b"\nx-phalanx-model:"
CONNECTION = b"\nconnection:"
_KNOWN = frozenset(
    {HOST, AUTHORIZATION, CONTENT_TYPE, CONTENT_LENGTH, REQUEST_ID, MODEL, CONNECTION}
)
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
        if name not in self.names:
            return None
        start = self._low.find(name) + len(name) - 1
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


def whole_request(data: bytes) -> tuple[bytes, bytes, FieldBlock, bytes] | None:
    """The start line, the target, the fields and the body; None where it is not plain or whole."""
    head = _REQUEST.match(data)
    if head is None:
        return None
    line, target, block = head.groups()
    fields = _fields(block)
    if fields is None or HOST not in fields.names:
        return None
    body = data[head.end() :]
    length = fields.get(CONTENT_LENGTH)
    if (len(body) if length is None else _number(length)) != len(body):
        return None
    if length is None and body:
        return None  # the next request
    return line, target, fields, body


def whole_response(data: bytes) -> tuple[bytes, int, FieldBlock, bytes] | None:
    """The status line, the status, the fields and the body; None where it is not plain or whole."""
    head = _RESPONSE.match(data)
    if head is None:
        return None
    line, status, block = head.groups()
    fields = _fields(block)
    if fields is None or status in (b"204", b"304"):
        return None
    length = fields.get(CONTENT_LENGTH)
    body = data[head.end() :]
    if length is None or _number(length) != len(body):
        return None
    return line, int(status), fields, body


def _fields(block: bytes) -> FieldBlock | None:
    low = b"\n" + block.lower()
    names = _NAMES.findall(low)
    if not _KNOWN.issuperset(names) or len(set(names)) != len(names):
        return None
    if CONNECTION in names and b"\nconnection: keep-alive\r" not in low:
        return None
    return FieldBlock(block, names, low)


def _number(digits: bytes) -> int:
    return int(digits) if digits.isdigit() and len(digits) <= _MAX_DIGITS else -1
