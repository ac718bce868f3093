"""The newest snapshot of a role that somebody else publishes, as it was last heard of."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from phalanx.routing.roles.snapshot import RoleSnapshot
from phalanx.routing.roles.waiting import SnapshotWaiters

NUM_LEFT = 32
"""Epochs that are remembered; an answer that comes after so many more lives is not expected."""


class RoleMirror:
    """Keeps epoch and revision as they were published. It never goes back within an epoch, and never
    to an epoch that it has left, since answers may overtake one another.

    `put`, `wait` and `close` belong to one event loop; `snapshot` is for any thread.
    """

    def __init__(self, first: RoleSnapshot) -> None:
        self._current = first
        self._left: deque[str] = deque(maxlen=NUM_LEFT)
        self._waiters = SnapshotWaiters(lambda: self._current)
        self._listeners: tuple[Callable[[RoleSnapshot], None], ...] = ()

    @property
    def snapshot(self) -> RoleSnapshot:
        return self._current

    @property
    def num_waiting(self) -> int:
        return self._waiters.num_waiting

    def put(self, snapshot: RoleSnapshot) -> bool:
        """Take a snapshot of a new epoch, or a later one of this epoch; whether it was taken."""
        current = self._current
        if snapshot.epoch != current.epoch:
            if snapshot.epoch in self._left:
                return False
            self._left.append(current.epoch)
        elif snapshot.revision <= current.revision:
            return False
        self._current = snapshot
        for listener in self._listeners:
            listener(snapshot)
        self._waiters.wake()
        return True

    def listen(self, listener: Callable[[RoleSnapshot], None]) -> Callable[[], None]:
        """Call `listener` with every later snapshot; the answer ends that."""
        self._listeners = (*self._listeners, listener)

        def end() -> None:
            self._listeners = tuple(other for other in self._listeners if other is not listener)

        return end

    async def wait(
        self, after_revision: int, timeout_s: float | None, epoch: str | None = None
    ) -> RoleSnapshot:
        """As `RoleRegistry.wait`."""
        return await self._waiters.wait(after_revision, timeout_s, epoch)

    def close(self) -> None:
        """Answer everybody who waits. The last snapshot stays to be read."""
        self._waiters.close()
