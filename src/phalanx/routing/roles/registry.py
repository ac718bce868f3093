"""What an inference manager has published of its role, for everybody who reads or waits for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from phalanx.routing.roles.snapshot import RoleContent, RoleSnapshot
from phalanx.routing.roles.waiting import SnapshotWaiters
from phalanx.routing.snapshot_publisher import SnapshotPublisher


class RoleRegistry:
    """One role's line of snapshots, that of `epoch`, beginning with `content` as revision 0.

    `publish`, `wait` and `close` belong to one event loop; `snapshot` is for any thread.
    """

    def __init__(self, role: str, epoch: str, content: RoleContent) -> None:
        first = RoleSnapshot(role, epoch, 0, content)
        self._publisher = SnapshotPublisher(first, _with_content)
        self._waiters = SnapshotWaiters(lambda: self._publisher.snapshot)

    @property
    def role(self) -> str:
        return self.snapshot.role

    @property
    def snapshot(self) -> RoleSnapshot:
        return self._publisher.snapshot

    @property
    def num_waiting(self) -> int:
        return self._waiters.num_waiting

    def publish(self, content: RoleContent, expected_revision: int) -> bool:
        """Make `content` the published one, if the revision is still the expected one.

        False where somebody else published in between. Identical content is no change: it leaves
        the revision and wakes nobody.
        """
        published = self._publisher.publish(content, expected_revision=expected_revision)
        if published and self.snapshot.revision != expected_revision:
            self._waiters.wake()
        return published

    def listen(self, listener: Callable[[RoleSnapshot], None]) -> Callable[[], None]:
        """Call `listener` with every later snapshot; the answer ends that.

        It must return at once and publish nothing.
        """
        return self._publisher.listen(listener)

    async def wait(
        self, after_revision: int, timeout_s: float | None, epoch: str | None = None
    ) -> RoleSnapshot:
        """The newest snapshot, once it is another than that of `after_revision` (and of `epoch`),
        or after `timeout_s`. None waits for as long as it takes.
        """
        return await self._waiters.wait(after_revision, timeout_s, epoch)

    def close(self) -> None:
        """Answer everybody who waits. The last snapshot stays to be read."""
        self._waiters.close()


def _with_content(current: RoleSnapshot, content: RoleContent) -> RoleSnapshot:
    if content == current.content:
        return current
    return replace(current, revision=current.revision + 1, content=content)
