"""Which of the requests that wait in their sockets the ranks of a replica still execute when it is
closed: all ranks the same ones, so that none of them waits in a collective for another.

Each rank writes into shared memory how far it has come, and the parent which request is the last:
the furthest that any rank has taken.
"""

from __future__ import annotations

import mmap
import os

# One page of words of 8 bytes, each with one writer: the parent's, then one of each rank.
_LAST = 0
_RANKS = 1

_OPEN = 0
_UNDECIDED = 1
_DECIDED = 2
"""What the parent's word says; decided on request `n` it is this much more than `n`."""


class Cutoff:
    """The parent's side."""

    def __init__(self, words: memoryview, num_ranks: int) -> None:
        self._words = words
        self._num_ranks = num_ranks

    def decide(self) -> None:
        """No rank begins a request from now on that none has taken before."""
        words = self._words
        words[_LAST] = _UNDECIDED
        # A full barrier: a rank that did not see this has been seen below.
        os.sched_yield()
        words[_LAST] = _DECIDED + max(words[_RANKS : _RANKS + self._num_ranks])


class RankCutoff:
    """One rank's side. The ranks of a replica are sent the same requests in the same order."""

    def __init__(self, words: memoryview, rank: int) -> None:
        self._words = words
        self._word = _RANKS + rank
        self._num_taken = 0

    def reach(self) -> None:
        """The next request, if one comes, is about to be received.

        Said before the system call that receives it, so that the parent, which is looked at after
        that, either knows of it or has been seen to decide.
        """
        self._words[self._word] = self._num_taken + 1

    def admits(self) -> bool:
        """Whether the request that was received is to be executed."""
        self._num_taken += 1
        last = self._words[_LAST]
        while last == _UNDECIDED:  # the parent is between two lines
            os.sched_yield()
            last = self._words[_LAST]
        return last == _OPEN or self._num_taken <= last - _DECIDED


def map_words(descriptor: int, offset: int) -> memoryview:
    """The words in a file whose page at `offset` was all zeros when it was made."""
    # An aligned word is stored and loaded whole.
    return memoryview(mmap.mmap(descriptor, mmap.PAGESIZE, offset=offset)).cast("Q")
