"""A pool of page numbers. Page 0 is the sink: it belongs to nobody and is never handed out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

SINK_PAGE = 0


class PagePool:
    """Hands out pages 1 to `num_pages` first in, first out."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._free = deque(range(1, num_pages + 1))

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages; the caller has checked that so many are free."""
        assert count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        return [self._free.popleft() for _ in range(count)]

    def give_back(self, pages: Iterable[int]) -> None:
        self._free.extend(pages)
