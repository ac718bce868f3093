"""Takes members out of a JSON object, or gives one another value, and leaves every other byte.

The object has been decoded before, so that it is known to be one, and which members it has. Where
the name stands in it once and plainly, that place is it, and nothing else is looked at.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from phalanx.errors import MalformedRequestError

MAX_TOKENS = 200_000
"""Strings and brackets that are looked at where a name is not found at a glance."""
_MAX_BEGIN = 256
"""Bytes of a body that are remembered."""
_SPACE = b" \t\n\r"
_BACKSLASH = 0x5C
"""A number, since a single byte is found several times faster by it."""
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_KEY = re.compile(rb"[ \t\n\r]*+(" + _STRING + rb")[ \t\n\r]*+:[ \t\n\r]*+", re.DOTALL)
_PLAIN_VALUE = re.compile(rb"[ \t\n\r]*+:[ \t\n\r]*+(" + _STRING + rb"|null)", re.DOTALL)
_WHOLE_STRING = re.compile(_STRING, re.DOTALL)
_SCALAR = re.compile(rb"[^,}\] \t\n\r]++")
_TOKEN = re.compile(rb'[^"\[\]{}]*+(?:' + _STRING + rb"|([\[{])|[\]}])", re.DOTALL)
_END = re.compile(rb"[ \t\n\r]*+([,}])")
_EMPTY = re.compile(rb"[ \t\n\r]*+}")
_LETTERS = (b"\\u006", b"\\u007", b"\\u005f", b"\\u005F")
"""How a letter or `_` is written that need not be escaped."""


class _Member(NamedTuple):
    """From behind the bracket or comma before it (`start`) to the comma or bracket after (`end`)."""

    name: bytes
    start: int
    end: int


def without_member(body: bytes, key: bytes) -> bytes:
    """`body`, which has the member, without it; all of them where it is there more than once.

    `key` is its name in quotation marks.
    """
    found = _plain(body, key)
    if found is None:
        return _without(body, key)
    start = len(body[: found.start() - len(key)].rstrip(_SPACE))
    after = _END.match(body, found.end())
    assert after is not None
    if body[start - 1] == 0x2C:  # a comma
        start -= 1
        end = after.start(1)
    else:
        end = after.end() if after.group(1) == b"," else after.start(1)
    return body[:start] + body[end:]


class MemberValue:
    """Gives one body after another `value`, as JSON, for its member `key`.

    Most bodies begin alike, up to the end of that value: such a beginning is looked into once.
    """

    __slots__ = ("_begin", "_key", "_new_begin", "_value")

    def __init__(self, key: bytes, value: bytes) -> None:
        self._key = key
        self._value = value
        self._begin = self._new_begin = b""

    def put(self, body: bytes) -> bytes:
        """`body`, which has the member, with the value; put first where it is there more than once."""
        begin = self._begin
        if begin and body.startswith(begin):
            at = len(begin)
            # Most bodies are plain by this alone.
            plain = _BACKSLASH not in body and body.find(self._key, at) < 0
            if plain or _is_plain(body, self._key, at):
                return self._new_begin + body[at:]
        found = _plain(body, self._key)
        if found is None:
            return self.add(_without(body, self._key))
        start, end = found.span(1)
        new_begin = body[:start] + self._value
        if end <= _MAX_BEGIN:
            self._begin, self._new_begin = body[:end], new_begin
        return new_begin + body[end:]

    def add(self, body: bytes) -> bytes:
        """`body`, which has no such member, with it in front of all others."""
        start = body.index(b"{") + 1
        comma = b"" if _EMPTY.match(body, start) else b","
        return b"%b%b:%b%b%b" % (body[:start], self._key, self._value, comma, body[start:])


def _plain(body: bytes, key: bytes) -> re.Match[bytes] | None:
    """What follows the only `key`, to the end of its value, if no other could be written with
    escaped letters; else None.
    """
    at = body.find(key) + len(key)
    if at < len(key) or not _is_plain(body, key, at):
        return None
    found = _PLAIN_VALUE.match(body, at)
    assert found is not None, "its value was decoded as a string or null"
    return found


def _is_plain(body: bytes, key: bytes, at: int) -> bool:
    """Whether `key` is not there from `at` on, nor could be written with escaped letters."""
    if body.find(key, at) >= 0:
        return False
    # Each look goes through the whole body, the first one much faster than the others.
    if _BACKSLASH not in body or b"\\u00" not in body:
        return True
    return not any(mark in body for mark in _LETTERS)


def _without(body: bytes, key: bytes) -> bytes:
    name = key[1:-1]
    start = body.index(b"{") + 1
    end = start
    kept = []
    for member in _members(body, start):
        end = member.end
        if member.name != name:
            kept.append(body[member.start : member.end])
    return body[:start] + b",".join(kept) + body[end:]


def _members(body: bytes, at: int) -> Iterator[_Member]:
    """Those of the object whose first byte inside is at `at`, with names decoded.

    Raises `MalformedRequestError` where there is too much to look at.
    """
    left = MAX_TOKENS
    while left > 0:
        key = _KEY.match(body, at)
        if key is None:
            return  # an object without members
        end, left = _value_end(body, key.end(), left)
        after = _END.match(body, end)
        if after is None:
            break  # it was left in the middle
        yield _Member(_name(key.group(1)), at, after.start(1))
        if after.group(1) == b"}":
            return
        at = after.end()
    raise MalformedRequestError(
        "the body has `model` or `route_key` more than once, or with escaped letters, and is too"
        " large to be searched; write each once, and plainly",
        field="model",
    )


def _value_end(body: bytes, at: int, left: int) -> tuple[int, int]:
    """Behind the value that begins at `at`, and how many tokens may still be looked at."""
    first = body[at : at + 1]
    if first not in (b"{", b"["):
        scalar = (_WHOLE_STRING if first == b'"' else _SCALAR).match(body, at)
        assert scalar is not None, "the object was decoded"
        return scalar.end(), left - 1
    depth = 0
    while left > 0:
        token = _TOKEN.match(body, at)
        assert token is not None, "the object was decoded"
        at = token.end()
        left -= 1
        if token.group(1) is not None:
            depth += 1
        elif body[at - 1] in b"]}":
            depth -= 1
            if depth == 0:
                return at, left
    return len(body), 0


def _name(quoted: bytes) -> bytes:
    if b"\\" not in quoted:
        return quoted[1:-1]
    try:
        name: str = json.loads(quoted)
    except UnicodeDecodeError:
        return quoted  # in quotation marks it is like no name that is looked for
    return name.encode("utf-8", "surrogatepass")
