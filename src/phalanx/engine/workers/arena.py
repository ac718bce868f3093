"""Shared memory that one process writes payloads into, which one or several others read once each.

Where a payload lies, its readers learn from a packet; they take payloads in the order in which they
were written. How many each has taken stands in the file's first page, in a counter that only it
writes, so that the writer needs no message to use the memory again. An only reader may keep some
payloads longer, as loans: arrays over the arena itself, given back when the last of them is gone.
"""

from __future__ import annotations

import bisect
import io
import mmap
import os
import weakref
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from phalanx.engine.workers.payload import ALIGNMENT, Bytes

MAX_READERS = 64
CUTOFF_OFFSET = mmap.PAGESIZE
"""Where the file has a page for a `Cutoff`, of which this module knows no more."""
_LOANS_OFFSET = 2 * mmap.PAGESIZE
_HEADER_BYTES = 3 * mmap.PAGESIZE
# One cache line a counter, and payloads start on one.
_LINE_BYTES = ALIGNMENT
_COUNTER_STRIDE = _LINE_BYTES // 8
MAX_LOANS = 64
# Up to here a copy takes less time than letting go of the interpreter lock, as numpy does, is worth.
_MAX_BRIEF_BYTES = 1 << 20


class Written(NamedTuple):
    """Where a payload is: its first byte, and how many payloads were written before it."""

    position: int
    sequence: int


class FreeSpace:
    """The gaps between what is taken; takes the lowest that fits.

    So memory that was used a moment ago, and is still in the caches, is used again.
    """

    def __init__(self, num_bytes: int) -> None:
        self._gaps = [(0, num_bytes)]

    def take(self, size: int) -> int | None:
        """The start of `size` bytes, or None where no gap is as large."""
        for index, (start, end) in enumerate(self._gaps):
            if end - start > size:
                self._gaps[index] = (start + size, end)
                return start
            if end - start == size:
                del self._gaps[index]
                return start
        return None

    def give_back(self, start: int, size: int) -> None:
        """Free what was taken."""
        end = start + size
        index = bisect.bisect(self._gaps, (start, end))
        if index < len(self._gaps) and self._gaps[index][0] == end:
            end = self._gaps.pop(index)[1]
        if index > 0 and self._gaps[index - 1][1] == start:
            index -= 1
            start = self._gaps.pop(index)[0]
        self._gaps.insert(index, (start, end))


def create_arena(num_bytes: int) -> io.FileIO:
    """The file of a new arena for payloads; memory is taken as it is first written."""
    if num_bytes < 1:
        raise ValueError(f"an arena of {num_bytes} bytes is too small; it takes at least 1")
    capacity = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    file = io.FileIO(os.memfd_create("phalanx-arena", os.MFD_CLOEXEC), "r+")
    file.truncate(_HEADER_BYTES + capacity)
    return file


class ArenaWriter:
    """The writing end; not safe to share between threads."""

    def __init__(self, descriptor: int, num_readers: int) -> None:
        if not 1 <= num_readers <= MAX_READERS:
            raise ValueError(f"an arena has 1 to {MAX_READERS} readers, not {num_readers}")
        counters, self._loans, self._body = _map(descriptor)
        self._counters = counters[:num_readers]
        self._view = self._body.data
        self._free = FreeSpace(len(self._body))
        # Position and size of what was not taken yet, in order, and of what is still on loan.
        self._untaken: deque[tuple[int, int]] = deque()
        self._lent: dict[int, tuple[int, int]] = {}
        self._num_written = 0

    def write(self, chunks: Sequence[bytes | memoryview], num_bytes: int) -> Written | None:
        """Copy the chunks in, one after another; None where no free space is as large."""
        self._reclaim()
        size = -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        position = self._free.take(size)
        if position is None:
            return None
        start = position
        for chunk in chunks:
            end = start + len(chunk)
            if len(chunk) < _MAX_BRIEF_BYTES:
                self._view[start:end] = chunk
            else:
                self._body[start:end] = np.frombuffer(chunk, np.uint8)
            start = end
        self._untaken.append((position, size))
        self._num_written += 1
        return Written(position, self._num_written - 1)

    def _reclaim(self) -> None:
        """Free what every reader has taken and nobody keeps."""
        num_taken = min(self._counters)
        while (sequence := self._num_written - len(self._untaken)) < num_taken:
            self._lent[sequence] = self._untaken.popleft()
        # Read after the counters: a loan stands there before its payload counts as taken.
        loans = self._loans.tolist()
        for sequence in [each for each in self._lent if each + 1 not in loans]:
            self._free.give_back(*self._lent.pop(sequence))


class ArenaReader:
    """The reading end of one of the readers; not safe to share between threads."""

    def __init__(self, descriptor: int, reader: int = 0) -> None:
        counters, loans, body = _map(descriptor)
        self._body = body.data
        self._counter = counters[reader : reader + 1]
        self._loans = Loans(loans, len(body) // 2)

    def view(self, position: int, num_bytes: int) -> memoryview:
        """A payload's bytes, valid until `release`; raises ValueError for an impossible place."""
        if not 0 <= position <= len(self._body) - num_bytes <= len(self._body):
            raise ValueError(
                f"{num_bytes} bytes at {position} do not lie in an arena of {len(self._body)}"
            )
        return self._body[position : position + num_bytes]

    def borrow(self, position: int, num_bytes: int, sequence: int) -> Bytes | None:
        """A payload's bytes, to be kept and written to; it may be released at once.

        They are given back when neither this array nor one over its memory is left. None where too
        much is on loan. Only for an arena with one reader.
        """
        view = self.view(position, num_bytes)
        return self._loans.lend(view, sequence)

    def release(self, sequence: int) -> None:
        """This reader needs neither this payload nor any before it any more, but for loans."""
        self._counter[0] = sequence + 1


class Loans:
    """Which payloads a reader keeps: `words` are their sequences plus one, or 0.

    A reader that kept very much would leave no room for what comes, so that both the number of its
    loans and their bytes are limited. Arrays may be given back on any thread.
    """

    def __init__(self, words: memoryview, max_bytes: int) -> None:
        self._words = words
        self._free = list(range(len(words)))
        self._max_bytes = max_bytes
        # The weak references must live to be called.
        self._given: dict[int, tuple[weakref.ref[Bytes], int]] = {}

    def lend(self, view: memoryview, sequence: int) -> Bytes | None:
        """An array over the view, or None where too much is on loan."""
        num_bytes = sum(num_bytes for _, num_bytes in list(self._given.values()))
        if not self._free or num_bytes + len(view) > self._max_bytes:
            return None
        word = self._free.pop()
        self._words[word] = sequence + 1
        # Over a view of its own: numpy's arrays refer to the first array over what is no array.
        array = np.frombuffer(view, np.uint8)
        self._given[word] = weakref.ref(array, lambda _: self._returned(word)), len(view)
        return array

    def _returned(self, word: int) -> None:
        self._given.pop(word)
        self._words[word] = 0
        self._free.append(word)


def _map(descriptor: int) -> tuple[memoryview, memoryview, Bytes]:
    """The readers' counters, the loans and the payloads' bytes; unmapped when every view of them is
    gone.
    """
    file = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    # An aligned word of 8 bytes is stored and loaded whole.
    counters = memoryview(file)[: MAX_READERS * _LINE_BYTES].cast("Q")[::_COUNTER_STRIDE]
    loans = memoryview(file)[_LOANS_OFFSET : _LOANS_OFFSET + MAX_LOANS * 8].cast("Q")
    return counters, loans, np.frombuffer(file, np.uint8, offset=_HEADER_BYTES)
