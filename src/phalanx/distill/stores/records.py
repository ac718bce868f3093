"""Records in files: a length, a checksum and the bytes, so that what was torn is told apart."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO

_HEAD = struct.Struct("<QI")


def framed(data: bytes) -> bytes:
    """`data` as a record."""
    return _HEAD.pack(len(data), zlib.crc32(data)) + data


def read_record(file: BinaryIO) -> bytes | None:
    """The next record; None at the end, and for one that is torn or damaged."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    size, checksum = _HEAD.unpack(head)
    data = file.read(size) if size < 1 << 40 else b""
    if len(data) != size or zlib.crc32(data) != checksum:
        return None
    return data


def read_records(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Whole records from the beginning, each with where the next one begins."""
    while (data := read_record(file)) is not None:
        yield data, file.tell()
