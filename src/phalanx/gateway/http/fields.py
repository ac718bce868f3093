"""Which header fields cross the gateway, and the blocks of bytes that are made of them (RFC 9110)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from http import HTTPStatus

Pair = tuple[bytes, bytes]

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    }
)
"""Said to the next neighbour only."""
INFERENCE_MODEL = b"x-inference-model"
"""Which of a role's models answers."""
OWN = frozenset({b"x-request-id", b"expect"})
"""Written by the gateway itself."""
SINGLE = (b"host", b"authorization", b"content-type", b"x-phalanx-model", b"transfer-encoding")
"""Said twice, they would let two readers understand two things."""
_NEVER_NAMED = frozenset({b"host", b"content-length", b"content-type", b"authorization"})
_PLAIN_CONNECTION = frozenset({b"keep-alive", b"close", b"upgrade", b"keep-alive, upgrade"})

STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode())
    for status in HTTPStatus
}


def status_line(status: int) -> bytes:
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def named_by_connection(value: bytes) -> frozenset[bytes]:
    """The further fields that a `connection` field says are for the next neighbour only."""
    lowered = value.lower()
    if lowered in _PLAIN_CONNECTION:
        return frozenset()
    return frozenset(part.strip() for part in lowered.split(b",")) - {b"close"}


def misnamed_by_connection(names: frozenset[bytes]) -> str:
    """A field among `names` without which the next reader would understand another message; empty
    where there is none.
    """
    for name in names:
        if name in _NEVER_NAMED or name.startswith(b"x-phalanx-"):
            return name.decode("latin-1")
    return ""


def field_lines(pairs: Sequence[Pair], dropped: frozenset[bytes]) -> list[bytes]:
    """The lines of the fields that are not dropped."""
    return [b"%b: %b\r\n" % pair for pair in pairs if pair[0] not in dropped]


def chunk(parts: Iterable[bytes | memoryview], num_bytes: int) -> list[bytes | memoryview]:
    """`parts`, which are not empty together, as one chunk."""
    return [b"%x\r\n" % num_bytes, *parts, b"\r\n"]
