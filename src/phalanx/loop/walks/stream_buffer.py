"""What a partition has received of a stream and not taken yet.

Items come out in the order in which they were registered, whenever they arrive. When the stream has
ended, what is left comes out as one final chunk, be it empty; so a full chunk is never the final
one, and what the chunks are does not depend on when they are taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from phalanx.loop.walks.chunk_policy import ChunkPolicy

T = TypeVar("T")


@dataclass(frozen=True)
class Chunk(Generic[T]):
    """Consecutive items of a stream, the first of them number `start`.

    The `num_context` leading ones were in an earlier chunk too. Nothing follows a `final` chunk.
    """

    items: tuple[T, ...]
    start: int
    num_context: int
    final: bool


class StreamBuffer(Generic[T]):
    """See the module. The producer registers, puts and finishes; the consumer takes."""

    def __init__(self, policy: ChunkPolicy) -> None:
        self._policy = policy
        self._expected: deque[Hashable] = deque()
        self._early: dict[Hashable, T] = {}
        self._items: deque[T] = deque()
        self._first = 0
        """The number of the first item in `_items`; those before it are in no later chunk."""
        self._num_chunks = 0
        self._num_seen = 0
        self._finished = False
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the final chunk was taken."""
        return self._closed

    def register(self, item_id: Hashable) -> None:
        """An item is on its way, behind all those that were registered before it."""
        assert not self._finished, f"item {item_id} comes after the end of the stream"
        self._expected.append(item_id)

    def put(self, item_id: Hashable, item: T) -> None:
        """A registered item has arrived; it waits for those before it."""
        assert item_id in self._expected, f"item {item_id} was not registered"
        self._early[item_id] = item
        while self._expected and self._expected[0] in self._early:
            self._items.append(self._early.pop(self._expected.popleft()))
        self._drop_unwanted()

    def finish(self) -> None:
        """No item will be registered any more."""
        self._finished = True

    @property
    def ready(self) -> bool:
        """Whether a chunk can be taken."""
        return not self._closed and (self._has_full or self._drained)

    def take(self) -> Chunk[T]:
        """The next chunk, which must be ready."""
        assert self.ready, "no chunk is ready"
        start, end = self._policy.bounds(self._num_chunks)
        last = not self._has_full
        items = tuple(islice(self._items, end - start))
        start = start if items else self._num_received
        chunk = Chunk(items, start, min(len(items), max(0, self._num_seen - start)), False)
        self._num_seen = max(self._num_seen, start + len(items))
        if not last:
            self._num_chunks += 1
            self._drop_unwanted()
            return chunk
        self._first += len(self._items)
        self._items.clear()
        if self._policy.continue_after_done:
            return chunk
        self._closed = True
        return Chunk(chunk.items, chunk.start, chunk.num_context, True)

    @property
    def _num_received(self) -> int:
        return self._first + len(self._items)

    @property
    def _has_full(self) -> bool:
        return self._num_received >= self._policy.bounds(self._num_chunks)[1]

    @property
    def _drained(self) -> bool:
        """Whether the stream has ended and all of it has arrived."""
        return self._finished and not self._expected

    def _drop_unwanted(self) -> None:
        """Forget the items that are in no later chunk."""
        start = self._policy.bounds(self._num_chunks)[0]
        while self._items and self._first < start:
            self._items.popleft()
            self._first += 1
