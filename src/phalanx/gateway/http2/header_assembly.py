"""Puts a header block together from its frames, within bounds."""

from __future__ import annotations

from typing import NamedTuple

from phalanx.gateway.http2.frames import (
    END_HEADERS,
    END_STREAM,
    HAS_PRIORITY,
    PADDED,
    ConnectionFault,
    ErrorCode,
)

MAX_CONTINUATIONS = 32
_EXTRAS = PADDED | HAS_PRIORITY


class HeaderBlock(NamedTuple):
    stream_id: int
    data: bytes
    last: bool


class HeaderAssembly:
    """One block at a time: `begin`, then `go_on` until one of them returns it. `open`: a block is
    not whole, so that nothing else may come.
    """

    def __init__(self, max_bytes: int) -> None:
        self.open = False
        self._max_bytes = max_bytes
        self._stream_id = 0
        self._last = False
        self._num_frames = 0
        self._parts = bytearray()

    def begin(self, flags: int, stream_id: int, payload: bytes) -> HeaderBlock | None:
        fragment = _without_extras(flags, payload) if flags & _EXTRAS else payload
        last = bool(flags & END_STREAM)
        if flags & END_HEADERS:
            self._check_size(len(fragment))
            return HeaderBlock(stream_id, fragment, last)
        self.open = True
        self._stream_id, self._last, self._num_frames = stream_id, last, 0
        self._parts = bytearray(fragment)
        self._check_size(len(fragment))
        return None

    def go_on(self, flags: int, stream_id: int, payload: bytes) -> HeaderBlock | None:
        if stream_id != self._stream_id or not stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "CONTINUATION of nothing")
        self._num_frames += 1
        self._parts += payload
        self._check_size(len(self._parts))
        if self._num_frames > MAX_CONTINUATIONS:
            raise ConnectionFault(
                ErrorCode.ENHANCE_YOUR_CALM,
                f"a header block in more than {MAX_CONTINUATIONS} parts",
            )
        if not flags & END_HEADERS:
            return None
        block = HeaderBlock(stream_id, bytes(self._parts), self._last)
        self.open = False
        self._stream_id, self._parts = 0, bytearray()
        return block

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise ConnectionFault(
                ErrorCode.ENHANCE_YOUR_CALM,
                f"a header block of {num_bytes} bytes or more; {self._max_bytes} are allowed",
            )


def _without_extras(flags: int, payload: bytes) -> bytes:
    """The fragment of a HEADERS frame, without padding and priority."""
    start, end = 0, len(payload)
    if flags & PADDED:
        if not payload:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a padded frame without its padding")
        start, end = 1, end - payload[0]
    if flags & HAS_PRIORITY:
        start += 5
    if start > end:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "more padding than frame")
    return payload[start:end]
