"""Header blocks (HPACK, RFC 7541): read with a table that peers are told to do without, and written
without one.

A block that uses no table means the same wherever it stands, so what it said is remembered.
"""

from __future__ import annotations

from collections.abc import Iterable

from hpack import Decoder, HPACKError

from phalanx.gateway.http2.frames import ConnectionFault, ErrorCode

Headers = tuple[tuple[bytes, bytes], ...]

MAX_FIELDS = 128
_NUM_REMEMBERED = 64
_MAX_REMEMBERED_BYTES = 1024
_NO_TABLE = b"\x20"
"""Tells the peer that no table is used from now on; at the beginning of a block."""
_STATUS_200 = b"\x88"


class HeaderReader:
    """Reads the blocks of one connection, in order: a block left out breaks those after it."""

    def __init__(self, max_bytes: int) -> None:
        self._decoder = Decoder(max_header_list_size=max_bytes)
        self._remembered: dict[bytes, Headers] = {}

    def without_table(self) -> None:
        """The peer has agreed to use no table; from now on it cannot.

        It should say so in its next block too, and not all do that never use one.
        """
        self._decoder.max_allowed_table_size = 0
        self._decoder.header_table_size = 0

    def read(self, block: bytes) -> Headers:
        """Raises `ConnectionFault` for a block that cannot be read, or says too much."""
        known = self._remembered.get(block)
        if known is not None:
            return known
        try:
            headers = tuple(
                (bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True)
            )
        except (HPACKError, IndexError) as error:
            raise ConnectionFault(
                ErrorCode.COMPRESSION_ERROR, f"a header block cannot be read: {error}"
            ) from error
        if len(headers) > MAX_FIELDS:
            raise ConnectionFault(
                ErrorCode.ENHANCE_YOUR_CALM, f"more than {MAX_FIELDS} header fields"
            )
        if self._decoder.header_table_size == 0 and len(block) <= _MAX_REMEMBERED_BYTES:
            if len(self._remembered) >= _NUM_REMEMBERED:
                self._remembered.pop(next(iter(self._remembered)))
            self._remembered[block] = headers
        return headers


def written(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A block that uses no table, and adds nothing to one."""
    parts = []
    for name, value in headers:
        if name == b":status" and value == b"200":
            parts.append(_STATUS_200)
        else:
            parts += [b"\x00", _length(len(name)), name, _length(len(value)), value]
    return b"".join(parts)


def first_on_connection(block: bytes) -> bytes:
    """The first block of a connection also says that no table is used."""
    return _NO_TABLE + block


def _length(number: int) -> bytes:
    if number < 0x7F:
        return bytes((number,))
    number -= 0x7F
    out = bytearray(b"\x7f")
    while number >= 0x80:
        out.append(0x80 | number & 0x7F)
        number >>= 7
    out.append(number)
    return bytes(out)
