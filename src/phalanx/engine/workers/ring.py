"""A ring of bytes in a shared-memory file: one process writes payloads, one or several read each.

Where a payload lies, its readers learn from a packet. A position counts the bytes that the ring
has ever taken (those skipped at its end too), and readers take payloads in the order of their
positions. How far each has come stands in the file's first page, in a counter that only it writes.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np

from phalanx.engine.workers.payload import Bytes

MAX_READERS = 64
_HEADER_BYTES = mmap.PAGESIZE
# One cache line a counter, and payloads start on one.
_LINE_BYTES = 64
_COUNTER_STRIDE = _LINE_BYTES // 8


def create_ring_file(num_bytes: int) -> int:
    """The descriptor of a new ring for `num_bytes`; memory is taken as the ring is written."""
    if num_bytes < _LINE_BYTES:
        raise ValueError(f"a ring of {num_bytes} bytes is too small; it takes at least 64")
    capacity = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    descriptor = os.memfd_create("phalanx-ring", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, _HEADER_BYTES + capacity)
    return descriptor


def _map(descriptor: int) -> tuple[memoryview, Bytes]:
    """The readers' counters and the payloads' bytes; unmapped when every view of them is gone."""
    file = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    # An aligned counter of 8 bytes is stored and loaded whole.
    consumed = memoryview(file)[:_HEADER_BYTES].cast("Q")[::_COUNTER_STRIDE]
    return consumed, np.frombuffer(file, np.uint8, offset=_HEADER_BYTES)


class RingWriter:
    """The writing end; not safe to share between threads."""

    def __init__(self, descriptor: int, num_readers: int) -> None:
        if not 1 <= num_readers <= MAX_READERS:
            raise ValueError(f"a ring has 1 to {MAX_READERS} readers, not {num_readers}")
        consumed, self._body = _map(descriptor)
        self._consumed = consumed[:num_readers]
        self.capacity = len(self._body)
        # Everything before `_floor` is free, everything from `_head` on is unwritten.
        self._head = self._floor = 0

    def write(self, chunks: Sequence[bytes | memoryview], num_bytes: int) -> int | None:
        """Copy the chunks in, one after another; their position, or None where they do not fit."""
        position = self._reserve(num_bytes)
        if position is None:
            return None
        body = self._body
        start = position % self.capacity
        for chunk in chunks:
            source = np.frombuffer(chunk, np.uint8)
            end = start + len(source)
            body[start:end] = source
            start = end
        return position

    def _reserve(self, num_bytes: int) -> int | None:
        size = -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        if size > self.capacity:
            return None
        self._floor = max(self._floor, min(self._consumed))
        position = self._head
        offset = position % self.capacity
        if self._floor >= self._head:
            # All is consumed: the beginning is the memory that is likeliest to be in the caches.
            position += -offset % self.capacity
            self._floor = position
        elif size > self.capacity - offset:
            position += self.capacity - offset
        if position + size - self._floor > self.capacity:
            return None
        self._head = position + size
        return position


class RingReader:
    """The reading end of one of the readers; not safe to share between threads."""

    def __init__(self, descriptor: int, reader: int = 0) -> None:
        self._consumed, body = _map(descriptor)
        self._body = body.data
        self._reader = reader
        self.capacity = len(self._body)

    def view(self, position: int, num_bytes: int) -> memoryview:
        """A payload's bytes, valid until `release`; raises ValueError for an impossible place."""
        start = position % self.capacity
        if position < 0 or not 0 <= num_bytes <= self.capacity - start:
            raise ValueError(
                f"{num_bytes} bytes at position {position} do not lie in a ring of {self.capacity}"
            )
        return self._body[start : start + num_bytes]

    def release(self, position: int, num_bytes: int) -> None:
        """This reader needs nothing up to the end of this payload any more."""
        end = position + num_bytes
        self._consumed[self._reader] = end + -end % _LINE_BYTES
