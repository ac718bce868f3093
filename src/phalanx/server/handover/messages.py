"""What a decode server asks a prefill server's bootstrap port, and is answered: each a length of 4
bytes (big endian), then msgpack.
"""

from __future__ import annotations

import asyncio
import struct
from typing import TypeVar

import msgspec

from phalanx.schema.generate import Handoff

T = TypeVar("T")

_LENGTH = struct.Struct(">I")
MAX_BYTES = 64 * 1024 * 1024
MAX_ASK_BYTES = 4096


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Answered once the room's prompt is computed, or cannot be."""

    room: int


class Given(msgspec.Struct, frozen=True, tag="given"):
    """The room's hand-over: it is given once."""

    handoff: Handoff


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """There is none, and why."""

    message: str


async def send(writer: asyncio.StreamWriter, message: Ask | Given | Refused) -> None:
    body = msgspec.msgpack.encode(message)
    writer.write(_LENGTH.pack(len(body)) + body)
    await writer.drain()


async def receive(
    reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[T], max_bytes: int
) -> T:
    """The next message. Raises `ConnectionError`, or `ValueError` for what is none."""
    try:
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if size > max_bytes:
            raise ValueError(f"a message of {size} bytes; at most {max_bytes} are allowed")
        return decoder.decode(await reader.readexactly(size))
    except asyncio.IncompleteReadError:
        raise ConnectionError("the other side closed the connection") from None
    except msgspec.DecodeError as error:
        raise ValueError(f"not a message of this protocol: {error}") from None
