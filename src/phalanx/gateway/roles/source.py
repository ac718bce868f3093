"""Where a gateway has a role's snapshots from: a registry in this process, or one that is followed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from phalanx.routing.roles.snapshot import RoleSnapshot


class RoleSource(Protocol):
    """`RoleRegistry` and `RoleMirror` are such."""

    @property
    def snapshot(self) -> RoleSnapshot: ...

    def listen(self, listener: Callable[[RoleSnapshot], None]) -> Callable[[], None]:
        """Call `listener` with every later snapshot; the answer ends that."""
        ...

    async def wait(
        self, after_revision: int, timeout_s: float | None, epoch: str | None = None
    ) -> RoleSnapshot:
        """The snapshot once it is another than that, or after `timeout_s`."""
        ...

    def close(self) -> None:
        """Answer everybody who waits."""
        ...
