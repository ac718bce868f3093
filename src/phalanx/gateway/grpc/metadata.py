"""What gRPC says in header fields: metadata, timeouts, and words of a status."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from urllib.parse import unquote_to_bytes

from phalanx.gateway.http2.header_blocks import Headers

Metadata = tuple[tuple[str, str | bytes], ...]

_UNITS_S = {
    b"H": 3600.0,
    b"M": 60.0,
    b"S": 1.0,
    b"m": 1e-3,
    b"u": 1e-6,
    b"n": 1e-9,
}
_MAX_DIGITS = 8
_MAX_MESSAGE_BYTES = 4096
_BINARY = "-bin"
_NOT_METADATA = frozenset({b"te", b"content-type", b"user-agent"})
_PLAIN = frozenset(range(0x20, 0x7F)) - {0x25}


def metadata_of(headers: Headers) -> Metadata:
    """What the other side's program added. Values that cannot be read are left out."""
    found: list[tuple[str, str | bytes]] = []
    for name, value in headers:
        if name.startswith((b":", b"grpc-")) or name in _NOT_METADATA:
            continue
        key = name.decode("ascii", "replace")
        if not key.endswith(_BINARY):
            found.append((key, value.decode("latin-1")))
            continue
        try:
            found += [(key, base64.b64decode(part + b"==")) for part in value.split(b",")]
        except binascii.Error:
            continue
    return tuple(found)


def headers_of(metadata: Metadata) -> list[tuple[bytes, bytes]]:
    """As they are sent. What may not stand in a header field is left out."""
    return [
        (key.encode(), coded)
        for key, value in metadata
        if (coded := _coded(key, value)) is not None and _allowed(key)
    ]


def timeout_s(value: bytes) -> float | None:
    """The seconds of a `grpc-timeout`; None where it is none."""
    unit, digits = _UNITS_S.get(value[-1:]), value[:-1]
    if unit is None or not digits.isdigit() or len(digits) > _MAX_DIGITS:
        return None
    return int(digits) * unit


def timeout_field(seconds: float) -> bytes:
    """A `grpc-timeout` of so much, in milliseconds where they can be written."""
    milliseconds = max(1, round(seconds * 1000))
    if milliseconds < 10**_MAX_DIGITS:
        return b"%dm" % milliseconds
    return b"%dS" % min(round(seconds), 10**_MAX_DIGITS - 1)


def message_field(text: str) -> bytes:
    """A `grpc-message`: UTF-8 of which only what is printable ASCII is as it is; cut where it would
    be longer than clients take.
    """
    coded = _percent_coded(text)
    while len(coded) > _MAX_MESSAGE_BYTES:
        text = text[: len(text) * _MAX_MESSAGE_BYTES // len(coded)]
        coded = _percent_coded(text)
    return coded


def message_text(value: bytes) -> str:
    return unquote_to_bytes(value).decode("utf-8", "replace")


def value_of(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """The last value of that name."""
    found = None
    for key, value in headers:
        if key == name:
            found = value
    return found


def _percent_coded(text: str) -> bytes:
    data = text.encode("utf-8", "replace")
    if all(byte in _PLAIN for byte in data):
        return data
    return b"".join(bytes((byte,)) if byte in _PLAIN else b"%%%02X" % byte for byte in data)


def _coded(key: str, value: str | bytes) -> bytes | None:
    if key.endswith(_BINARY):
        data = value.encode() if isinstance(value, str) else value
        return base64.b64encode(data).rstrip(b"=")
    data = value.encode("latin-1", "replace") if isinstance(value, str) else value
    return data if all(0x20 <= byte < 0x7F for byte in data) else None


def _allowed(key: str) -> bool:
    return key.isascii() and key == key.lower() and bool(key) and key[0] != ":"
