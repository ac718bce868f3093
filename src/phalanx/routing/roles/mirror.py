"""The newest snapshot of a role that somebody else publishes, as it was last heard of."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.routing.roles.snapshot import RoleSnapshot
from phalanx.routing.roles.waiting import SnapshotWaiters


class RoleMirror:
    """Keeps epoch and revision as they were published, and never goes back within an epoch.

    `put`, `wait` and `close` belong to one event loop; `snapshot` is for any thread.
    """

    def __init__(self, first: RoleSnapshot) -> None:
        self._current = first
        self._waiters = SnapshotWaiters(lambda: self._current)
        self._listeners: tuple[Callable[[RoleSnapshot], None], ...] = ()

    @property
    def snapshot(self) -> RoleSnapshot:
        return self._current

    @property
    def num_waiting(self) -> int:
        return self._waiters.num_waiting

    def put(self, snapshot: RoleSnapshot) -> bool:
        """Take a snapshot of another epoch, or a later one of this epoch; whether it was taken.

        Answers that overtake one another are the reader's to put in order where epochs differ.
        """
        current = self._current
        if snapshot.epoch == current.epoch and snapshot.revision <= current.revision:
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
