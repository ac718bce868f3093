"""The current snapshot, replaced whole by compare-and-swap on its revision.

Reading it takes no lock; a reader keeps a consistent view for as long as it holds one snapshot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from phalanx.routing.snapshot import Server, Snapshot

Listener = Callable[[Snapshot], None]


class Publisher:
    """One line of snapshots, that of `epoch`. Safe to use from any thread."""

    def __init__(self, epoch: str) -> None:
        self._current = Snapshot(epoch)
        self._lock = threading.Lock()
        self._listeners: tuple[Listener, ...] = ()

    @property
    def snapshot(self) -> Snapshot:
        return self._current

    def publish(self, servers: tuple[Server, ...], *, expected_revision: int) -> bool:
        """Make `servers` the published ones, if the revision is still the expected one.

        False where somebody else published in between: read the snapshot again and start over.
        Publishing what is published already is no change and leaves the revision. Listeners are
        called in the publishing thread, in the order of the revisions.
        """
        with self._lock:
            current = self._current
            if current.revision != expected_revision:
                return False
            if servers == current.servers:
                return True
            self._current = replace(current, revision=current.revision + 1, servers=servers)
            for listener in self._listeners:
                listener(self._current)
        return True

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with every later snapshot; the answer ends that.

        It must return at once and publish nothing.
        """
        with self._lock:
            self._listeners = (*self._listeners, listener)

        def end() -> None:
            with self._lock:
                self._listeners = tuple(other for other in self._listeners if other is not listener)

        return end
