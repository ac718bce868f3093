"""Packets over a connection between machines, each behind its length."""

from __future__ import annotations

import socket
import struct

_LENGTH = struct.Struct("!Q")


def framed(packet: bytes) -> bytes:
    """What is sent for it."""
    return _LENGTH.pack(len(packet)) + packet


def received(link: socket.socket, limit: int | None = None) -> bytes | None:
    """The next packet; None at the end, or for one that is larger than `limit`."""
    length = exactly(link, _LENGTH.size)
    if length is None:
        return None
    size: int = _LENGTH.unpack(length)[0]
    return None if limit is not None and size > limit else exactly(link, size)


def exactly(link: socket.socket, size: int) -> bytes | None:
    """So many bytes; None where the connection ends before."""
    parts = bytearray()
    while len(parts) < size:
        part = link.recv(min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)
