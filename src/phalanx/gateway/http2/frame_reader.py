"""Cuts the bytes of a connection into frames, without waiting for the end of those with data."""

from __future__ import annotations

from typing import Protocol

from phalanx.gateway.http2.frames import (
    DATA,
    END_STREAM,
    HEAD_BYTES,
    PADDED,
    ConnectionFault,
    ErrorCode,
    head_fields,
)


class FrameSink(Protocol):
    """A DATA frame is `data_begins`, any number of `data`, and `data_ends`; its padding counts in
    `num_bytes` and is not shown. Pieces lie in the bytes that were fed.
    """

    def data_begins(self, stream_id: int, num_bytes: int) -> None: ...

    def data(self, piece: memoryview) -> None: ...

    def data_ends(self, *, last: bool) -> None: ...

    def frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None: ...


class FrameReader:
    """`feed` takes what arrives, and raises `ConnectionFault` where a frame is not one.

    `max_data_bytes` is the largest frame of data, `max_other_bytes` of all others, which are kept
    until they are whole.
    """

    def __init__(self, sink: FrameSink, *, max_data_bytes: int, max_other_bytes: int) -> None:
        self._sink = sink
        self._max_data_bytes = max_data_bytes
        self._max_other_bytes = max_other_bytes
        self._kept = bytearray()
        self._needed = HEAD_BYTES
        self._in_data = False
        self._content_left = 0
        self._padding_left = 0
        self._padding_unknown = False
        self._last = False

    def feed(self, data: memoryview) -> None:
        position, end = 0, len(data)
        while position < end:
            if self._in_data:
                position = self._take_data(data, position, end)
            elif self._kept or end - position < HEAD_BYTES:
                position = self._keep(data, position, end)
            else:
                position = self._take_frame(data, position, end)

    def _take_frame(self, data: memoryview, position: int, end: int) -> int:
        """A frame whose head is there, and which is there as a whole unless it is one of data."""
        num_bytes, kind, flags, stream_id = head_fields(data, position)
        start = position + HEAD_BYTES
        if kind == DATA:
            self._begin_data(num_bytes, flags, stream_id)
            return start
        self._check_size(num_bytes)
        if start + num_bytes > end:
            self._needed = HEAD_BYTES + num_bytes
            self._kept += data[position:]
            return end
        self._sink.frame(kind, flags, stream_id, bytes(data[start : start + num_bytes]))
        return start + num_bytes

    def _keep(self, view: memoryview, position: int, end: int) -> int:
        """A part of a head, or of a frame that is kept until it is whole."""
        kept = self._kept
        stop = min(end, position + self._needed - len(kept))
        kept += view[position:stop]
        if len(kept) < self._needed:
            return stop
        num_bytes, kind, flags, stream_id = head_fields(kept, 0)
        if kind == DATA:
            self._reset()
            self._begin_data(num_bytes, flags, stream_id)
        elif len(kept) == HEAD_BYTES + num_bytes:
            payload = bytes(kept[HEAD_BYTES:])
            self._reset()
            self._sink.frame(kind, flags, stream_id, payload)
        else:
            self._check_size(num_bytes)
            self._needed = HEAD_BYTES + num_bytes
        return stop

    def _reset(self) -> None:
        self._kept = bytearray()
        self._needed = HEAD_BYTES

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_other_bytes:
            raise ConnectionFault(
                ErrorCode.FRAME_SIZE_ERROR,
                f"a frame of {num_bytes} bytes, more than {self._max_other_bytes}",
            )

    def _begin_data(self, num_bytes: int, flags: int, stream_id: int) -> None:
        if num_bytes > self._max_data_bytes:
            raise ConnectionFault(
                ErrorCode.FRAME_SIZE_ERROR,
                f"a DATA frame of {num_bytes} bytes, more than {self._max_data_bytes}",
            )
        self._last = bool(flags & END_STREAM)
        self._padding_unknown = bool(flags & PADDED)
        self._content_left, self._padding_left = num_bytes, 0
        if self._padding_unknown and not num_bytes:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a padded frame without its padding")
        self._sink.data_begins(stream_id, num_bytes)
        self._in_data = True
        self._end_if_whole()

    def _take_data(self, view: memoryview, position: int, end: int) -> int:
        if self._padding_unknown:
            self._padding_unknown = False
            self._padding_left = view[position]
            self._content_left -= 1 + self._padding_left
            position += 1
            if self._content_left < 0:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "more padding than frame")
        if self._content_left:
            stop = min(end, position + self._content_left)
            if stop > position:
                self._content_left -= stop - position
                self._sink.data(view[position:stop])
        else:
            stop = min(end, position + self._padding_left)
            self._padding_left -= stop - position
        self._end_if_whole()
        return stop

    def _end_if_whole(self) -> None:
        if not (self._content_left or self._padding_left or self._padding_unknown):
            self._in_data = False
            self._sink.data_ends(last=self._last)
