"""One token sequence of a paged cache: which pages hold it and how much of them is stored."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class Residence(enum.Enum):
    """Where a stream's tokens are. Only on the device can a step reserve it; whoever moves it owns
    it until it is at one of the two ends.
    """

    DEVICE = "device"
    MOVING = "moving"
    HOST = "host"


class CacheStream:
    """The pages of one (request, label). `pages` is a high-water mark: it may exceed what
    `stored_len` needs, and a plan cuts its view to what the step can see. `host_pages` hold the
    tokens while they are on the host.
    """

    __slots__ = (
        "_pages",
        "generation",
        "host_pages",
        "num_pages",
        "residence",
        "step_in_flight",
        "stored_len",
    )

    def __init__(self) -> None:
        self._pages: NDArray[np.int32] = np.zeros(8, dtype=np.int32)
        self.num_pages = 0
        self.stored_len = 0
        self.generation = 0
        self.step_in_flight = False
        self.residence = Residence.DEVICE
        self.host_pages: tuple[int, ...] = ()

    @property
    def pages(self) -> NDArray[np.int32]:
        """The page numbers in sequence order, int32 [num_pages]."""
        return self._pages[: self.num_pages]

    def append(self, pages: Sequence[int]) -> None:
        needed = self.num_pages + len(pages)
        if needed > len(self._pages):
            grown = np.zeros(max(needed, 2 * len(self._pages)), dtype=np.int32)
            grown[: self.num_pages] = self.pages
            self._pages = grown
        self._pages[self.num_pages : needed] = pages
        self.num_pages = needed

    def cut(self, num_pages: int) -> list[int]:
        """Drop the pages behind the first `num_pages` and return them."""
        dropped: list[int] = self._pages[num_pages : self.num_pages].tolist()
        self.num_pages = min(num_pages, self.num_pages)
        return dropped
