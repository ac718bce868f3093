"""A pool of page numbers. Page 0 is the sink: it belongs to nobody and is never handed out."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.step.resources.prefix_index import PrefixIndex

SINK_PAGE = 0


class PagePool:
    """Hands out pages 1 to `num_pages`, those given back last first: they are still in the
    processor's caches, and pages that nobody needs are never touched.

    A page may have several holders. One that `index` knows is kept when its last holder has given
    it back; it counts as free, and is taken when no other page is left.
    """

    def __init__(self, num_pages: int, index: PrefixIndex | None = None) -> None:
        self._num_pages = num_pages
        self._index = PrefixIndex() if index is None else index
        self._free = list(range(num_pages, 0, -1))
        self._holders = [0] * (num_pages + 1)

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def num_free(self) -> int:
        """Pages that `take` can hand out."""
        return len(self._free) + self._index.num_resting

    @property
    def num_cached(self) -> int:
        """Those of the free pages that still hold known tokens."""
        return self._index.num_resting

    def num_freed_by(self, pages: Sequence[int]) -> int:
        """How many of a stream's pages would be free if it gave them back."""
        return sum(self._holders[page] == 1 for page in pages)

    def take(self, count: int) -> list[int]:
        """`count` pages; the caller has checked that so many are free."""
        assert count <= self.num_free, f"{count} pages wanted, {self.num_free} free"
        taken = [self._free.pop() if self._free else self._index.give_up() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """One more holder for each of these registered pages."""
        for page in pages:
            assert page in self._index, f"page {page} is not registered"
            self._index.wake(page)
            self._holders[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """One holder fewer for each of these pages, which come in the order of their tokens.

        Freed ones are the next to be taken, in that order. Of kept ones the last is given up first:
        without its beginning nobody finds the rest.
        """
        for page in reversed(pages):
            self._holders[page] -= 1
            assert self._holders[page] >= 0, f"page {page} is given back by nobody who holds it"
            if self._holders[page]:
                continue
            if page in self._index:
                self._index.rest(page)
            else:
                self._free.append(page)

    def forget(self) -> None:
        """Keep no page for what it holds any more."""
        self._free.extend(self._index.clear())
