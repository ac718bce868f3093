"""A pool of page numbers. Page 0 is the sink: it belongs to nobody and is never handed out."""

from __future__ import annotations

from collections.abc import Sequence

SINK_PAGE = 0


class PagePool:
    """Hands out pages 1 to `num_pages`, those given back last first: they are still in the
    processor's caches, and pages that nobody needs are never touched.
    """

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages; the caller has checked that so many are free."""
        assert count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: Sequence[int]) -> None:
        """Pages in the order in which they were taken; the next ones to be taken, in that order."""
        self._free.extend(reversed(pages))
