"""Which cached pages hold what: full pages by the digest of all tokens up to their end, and the order
in which those that no request holds are given up.

Pure bookkeeping: no memory, no lock, no clock, so every rank of a replica keeps the same books.
"""

from __future__ import annotations

from collections import OrderedDict


class PrefixIndex:
    """A page is registered once, under one digest. It rests while nobody holds it; the one that has
    rested longest is given up first.
    """

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._resting: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, page: int) -> bool:
        return page in self._digest_of

    def __len__(self) -> int:
        return len(self._digest_of)

    @property
    def num_resting(self) -> int:
        """Registered pages that nobody holds."""
        return len(self._resting)

    def find(self, digest: bytes) -> int | None:
        """The page that holds these tokens."""
        return self._page_of.get(digest)

    def register(self, digest: bytes, page: int) -> bool:
        """Note what a held page holds; False where another one is known to hold the same."""
        assert page not in self._digest_of, f"page {page} is registered already"
        if digest in self._page_of:
            return False
        self._page_of[digest], self._digest_of[page] = page, digest
        return True

    def rest(self, page: int) -> None:
        """Nobody holds a registered page any more."""
        self._resting[page] = None

    def wake(self, page: int) -> None:
        """A registered page is held; it may have been before."""
        self._resting.pop(page, None)

    def give_up(self) -> int:
        """Forget the page that has rested longest, of which there must be one."""
        page, _ = self._resting.popitem(last=False)
        del self._page_of[self._digest_of.pop(page)]
        return page

    def clear(self) -> list[int]:
        """Forget everything; returns the pages that rested, longest first."""
        rested = list(self._resting)
        self._page_of.clear()
        self._digest_of.clear()
        self._resting.clear()
        return rested
