"""Cuts a stream of bytes into gRPC's messages, each of which has a prefix that tells its length."""

from __future__ import annotations

import zlib
from collections import deque
from typing import NamedTuple, cast

from phalanx.errors import BodyTooLargeError, MalformedRequestError
from phalanx.gateway.http2.read_buffer import READ_BYTES

PREFIX_BYTES = 5
_SPARE_BYTES = READ_BYTES
_LONG_BYTES = READ_BYTES // 4
_PIECE_BYTES = 256
"""What keeping a piece costs beside its bytes."""
_SHORT_BYTES = 4096
"""A shorter piece is copied, so that it keeps nothing else."""


Pieces = tuple[bytes | memoryview, ...]
"""The bytes of one message, as they were read."""


class Message(NamedTuple):
    pieces: Pieces
    compressed: bool = False

    @property
    def data(self) -> bytes:
        """All of it in one, which copies what came in several."""
        return b"".join(self.pieces)


def prefixed(data: bytes) -> bytes:
    """The prefix of a message that is sent as it is."""
    return prefix_of(len(data))


def prefix_of(num_bytes: int) -> bytes:
    """That of a message of so many bytes."""
    return b"\x00" + num_bytes.to_bytes(4, "big")


class MessageReader:
    """`feed` what arrives and take from `whole`.

    Pieces that are not short are kept as they lie in what was read, as long as that holds little
    else; those of a whole message too, as long as it holds no more than as much again, or, where it
    is long, one read more.
    """

    def __init__(self, max_bytes: int) -> None:
        self.whole: deque[Message] = deque()
        self._max_bytes = max_bytes
        self._prefix = b""
        self._pieces: list[memoryview | bytes] = []
        self._left = 0
        self._num_bytes = 0
        self._kept_bytes = 0
        self._source: object = None

    @property
    def amid(self) -> bool:
        """Whether a message has begun and is not whole."""
        return bool(self._prefix)

    def feed(self, piece: memoryview) -> None:
        """Raises `BodyTooLargeError`, or `MalformedRequestError` for a prefix that is none."""
        position, end = 0, len(piece)
        while position < end:
            if len(self._prefix) < PREFIX_BYTES:
                stop = min(end, position + PREFIX_BYTES - len(self._prefix))
                self._prefix += bytes(piece[position:stop])
                position = stop
                if len(self._prefix) < PREFIX_BYTES:
                    return
                self._begin()
            else:
                stop = min(end, position + self._left)
                self._keep(piece[position:stop])
                self._left -= stop - position
                position = stop
            if not self._left:
                self._finish()

    def _begin(self) -> None:
        flag, self._left = self._prefix[0], int.from_bytes(self._prefix[1:], "big")
        self._num_bytes = self._left
        if flag > 1:
            raise MalformedRequestError(f"the message begins with {flag}, which means nothing")
        if self._left > self._max_bytes:
            raise BodyTooLargeError(
                f"the message has {self._left} bytes; at most {self._max_bytes} are allowed"
            )

    def _keep(self, piece: memoryview) -> None:
        self._kept_bytes += _PIECE_BYTES
        if len(piece) < _SHORT_BYTES:
            self._pieces.append(bytes(piece))
            self._kept_bytes += len(piece)
        else:
            self._pieces.append(piece)
            source = piece.obj
            if source is not self._source:
                self._source = source
                self._kept_bytes += len(cast(bytes, source))
        if self._kept_bytes > 2 * self._num_bytes + _SPARE_BYTES:
            self._compact()

    def _compact(self) -> None:
        """Let go of what else was read with the pieces."""
        joined = b"".join(self._pieces)
        self._pieces, self._source = [joined], None
        # Half of it is room, until it is worth while again.
        self._kept_bytes = len(joined)

    def _finish(self) -> None:
        num_bytes = self._num_bytes
        # A long one lies in a read more than it fills.
        spare = READ_BYTES if num_bytes >= _LONG_BYTES else 0
        if self._kept_bytes > 2 * num_bytes + spare:
            self._pieces = [b"".join(self._pieces)]
        self.whole.append(Message(tuple(self._pieces), self._prefix[0] == 1))
        self._prefix, self._pieces, self._source = b"", [], None
        self._kept_bytes = 0


def decompressed(data: bytes, encoding: bytes, max_bytes: int) -> bytes:
    """A message as it was before `encoding`, one of `ENCODINGS`. Raises `MalformedRequestError`, or
    `BodyTooLargeError` before more than `max_bytes` are in memory.
    """
    decompressor = zlib.decompressobj(ENCODINGS[encoding])
    try:
        plain = decompressor.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise MalformedRequestError(
            f"the message cannot be decompressed as {encoding.decode()}: {error}"
        ) from error
    if len(plain) > max_bytes:
        raise BodyTooLargeError(
            f"the message has more than {max_bytes} bytes when decompressed, which is not allowed"
        )
    if not decompressor.eof:
        raise MalformedRequestError("the compressed message ends too early")
    return plain


ENCODINGS = {b"gzip": 31, b"deflate": 15}
"""Names of compressions, and what zlib calls them."""
