"""The current snapshot, replaced whole by compare-and-swap on its revision.

Reading it takes no lock; a reader keeps a consistent view for as long as it holds one snapshot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Revisioned(Protocol):
    """`revision` grows by one with every change of what is published, and never otherwise."""

    @property
    def revision(self) -> int: ...


SnapshotT = TypeVar("SnapshotT", bound=Revisioned)
ContentT = TypeVar("ContentT")


class SnapshotPublisher(Generic[SnapshotT, ContentT]):
    """One line of snapshots, each the last one with other content. Safe to use from any thread.

    `succeed` gives the snapshot that follows one, with the next revision; or that one itself where
    its content is the given one already.
    """

    def __init__(
        self, first: SnapshotT, succeed: Callable[[SnapshotT, ContentT], SnapshotT]
    ) -> None:
        self._current = first
        self._succeed = succeed
        self._lock = threading.Lock()
        self._listeners: tuple[Callable[[SnapshotT], None], ...] = ()

    @property
    def snapshot(self) -> SnapshotT:
        return self._current

    def publish(self, content: ContentT, *, expected_revision: int) -> bool:
        """Make `content` the published one, if the revision is still the expected one.

        False where somebody else published in between: read the snapshot again and start over.
        Publishing what is published already is no change and leaves the revision. Listeners are
        called in the publishing thread, in the order of the revisions.
        """
        with self._lock:
            current = self._current
            if current.revision != expected_revision:
                return False
            following = self._succeed(current, content)
            if following is current:
                return True
            assert following.revision == current.revision + 1
            self._current = following
            for listener in self._listeners:
                listener(following)
        return True

    def listen(self, listener: Callable[[SnapshotT], None]) -> Callable[[], None]:
        """Call `listener` with every later snapshot; the answer ends that.

        It must return at once and publish nothing.
        """
        with self._lock:
            self._listeners = (*self._listeners, listener)

        def end() -> None:
            with self._lock:
                self._listeners = tuple(other for other in self._listeners if other is not listener)

        return end
