"""The messages between a reader and a holder: a length of 4 bytes (big endian), then msgpack."""

from __future__ import annotations

import socket
import struct

import msgspec

from phalanx.step.transfer.base import Ending, PageRead
from phalanx.step.transfer.deadline import Deadline

_LENGTH = struct.Struct(">I")
LENGTH_BYTES = _LENGTH.size
MAX_CALL_BYTES = 1 << 14
"""Little, since anybody may send so many bytes before the token is known."""
MAX_ANSWER_BYTES = 1 << 20
_NO_MESSAGE = (msgspec.DecodeError, RecursionError, UnicodeError)
"""What decoding raises; nested too deeply it is a `RecursionError`."""


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Answered with `Content` and the chunks, or `Refused`."""

    token: str
    hold: str
    read: PageRead


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Answered with `Ended` once the hold has ended."""

    token: str
    hold: str
    ending: Ending


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """Answered with `Ended`, when the hold ends."""

    token: str
    hold: str


class Header(msgspec.Struct, frozen=True, tag="content"):
    """So many chunks of this size follow."""

    num_chunks: int
    chunk_bytes: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Nothing follows; the message says why."""

    message: str


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """How the hold ended."""

    ending: Ending


Call = Read | Release | Watch
Answer = Header | Refused | Ended
_CALLS = msgspec.msgpack.Decoder(Call)
_ANSWERS = msgspec.msgpack.Decoder(Answer)


class FrameError(ValueError):
    """The bytes are no message of this protocol."""


def encoded(message: Call | Answer) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class CallBuffer:
    """One call as it arrives."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Call | None:
        """The call once it is whole; raises `FrameError` where there can be none."""
        self._bytes += data
        if len(self._bytes) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._bytes)
        if size > MAX_CALL_BYTES:
            raise FrameError(f"a call of {size} bytes; at most {MAX_CALL_BYTES} are allowed")
        missing = _LENGTH.size + size - len(self._bytes)
        if missing > 0:
            return None
        if missing < 0:
            raise FrameError("bytes behind a call; a connection is for one call")
        try:
            return _CALLS.decode(self._bytes[_LENGTH.size : _LENGTH.size + size])
        except _NO_MESSAGE as error:
            raise FrameError(f"not a call: {error}") from None


def receive_answer(connection: socket.socket, deadline: Deadline | None = None) -> Answer:
    """The next answer; raises `FrameError` and `OSError`."""
    size = answer_bytes(_received(connection, LENGTH_BYTES, deadline))
    return decoded_answer(_received(connection, size, deadline))


def answer_bytes(length: bytes | bytearray) -> int:
    """How many bytes follow the `LENGTH_BYTES` that an answer begins with."""
    (size,) = _LENGTH.unpack(length)
    if size > MAX_ANSWER_BYTES:
        raise FrameError(f"an answer of {size} bytes; at most {MAX_ANSWER_BYTES} are allowed")
    return int(size)


def decoded_answer(body: bytes | bytearray) -> Answer:
    """The answer behind its length."""
    try:
        return _ANSWERS.decode(body)
    except _NO_MESSAGE as error:
        raise FrameError(f"not an answer: {error}") from None


def receive_into(
    connection: socket.socket, view: memoryview, deadline: Deadline | None = None
) -> None:
    """Fill `view`; raises `ConnectionError` where the other side ends before.

    Without a deadline the limit is the connection's, which is one for each time that bytes come.
    """
    while view:
        if deadline is not None:
            deadline.limit(connection)
        count = connection.recv_into(view)
        if count == 0:
            raise ConnectionError("the other side closed the connection")
        view = view[count:]


def _received(connection: socket.socket, num_bytes: int, deadline: Deadline | None) -> bytearray:
    buffer = bytearray(num_bytes)
    receive_into(connection, memoryview(buffer), deadline)
    return buffer
