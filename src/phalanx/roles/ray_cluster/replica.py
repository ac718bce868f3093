"""A replica on a Ray cluster: its processes on one machine or several, as one thing that lives or
does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from phalanx.errors import RoleOperationFailedError
from phalanx.roles.engine_command import ListenAddress
from phalanx.roles.ray_cluster.cluster import RayCluster
from phalanx.roles.ray_cluster.groups import RayPlacementGroup
from phalanx.roles.ray_cluster.host import is_over
from phalanx.roles.ray_cluster.host_actor import HostActor, HostLostError
from phalanx.roles.ray_cluster.observed import NodePart

_PAUSE_S = 0.2
_DISCARD_S = 10.0


class RunningPart:
    """What runs on one machine. `pid` is the number of the process there, None before its start."""

    def __init__(self, cluster: RayCluster, node: NodePart, actor: HostActor) -> None:
        self.node = node
        self.actor = actor
        self.pid: int | None = None
        self._cluster = cluster

    async def exited(self) -> str:
        """Wait until the process has ended by itself, its actor has died or its machine was lost."""
        try:
            return await self.actor.exited()
        except HostLostError as error:
            if self._is_there:
                return f"on {self.node.address}: its actor has died: {error}"
            return f"its machine {self.node.address} was lost"

    async def stop(self, grace_s: float) -> None:
        """Returns when the process and the actor are gone. Raises `RoleOperationFailedError` where
        nobody can say; a machine that Ray counts as lost can be asked nothing, and is gone.
        """
        try:
            await self.actor.stop(grace_s)
        except HostLostError:
            await self._see_it_gone()
        await self.actor.kill()

    async def discard(self) -> None:
        """Of one whose start failed, at whatever point."""
        try:
            async with asyncio.timeout(_DISCARD_S):
                await self.actor.stop(0.0)
        except (TimeoutError, HostLostError):
            pass  # it was never there, or dies now
        await self.actor.kill()

    @property
    def _is_there(self) -> bool:
        return self._cluster.is_alive(self.node.node_id)

    async def _see_it_gone(self) -> None:
        """Of an actor that died: the guard of its process kills what it leaves."""
        try:
            while self.pid is not None and self._is_there:
                if await self._cluster.run_on(self.node.node_id, is_over, self.pid):
                    return
                await asyncio.sleep(_PAUSE_S)
        except RoleOperationFailedError as error:
            if self._is_there:
                raise RoleOperationFailedError(
                    f"nobody can say whether process {self.pid} on {self.node.address} is gone:"
                    f" {error}"
                ) from error


class RayReplica:
    """Implements `contracts.LaunchedReplica`; the head comes first in `parts`, and only it is told of.

    `extra` is a placement group of its own, which ends with it. `ended` is told of it when nothing of
    it is left.
    """

    def __init__(
        self,
        address: ListenAddress,
        parts: Sequence[RunningPart],
        extra: RayPlacementGroup | None = None,
        ended: Callable[[RayReplica], None] | None = None,
    ) -> None:
        self.parts = tuple(parts)
        self._address = address
        self._extra = extra
        self._ended = ended
        self._stopping = False
        self._stopped = False
        self._lock = asyncio.Lock()

    @property
    def url(self) -> str:
        return self._address.url

    @property
    def bootstrap_port(self) -> int | None:
        return self._address.bootstrap_port

    async def exited(self) -> str:
        """Wait until a process of it has ended, an actor has died or a machine was lost; which."""
        waiting = {asyncio.create_task(part.exited()): part for part in self.parts}
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            reason = "; ".join(self._named(waiting[task], task.result()) for task in done)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        if self._stopping:
            await asyncio.get_running_loop().create_future()
        return reason

    async def stop(self, grace_s: float) -> None:
        """Any number of times; raises `RoleOperationFailedError` where it is not known to be gone. A
        machine that Ray counts as lost is: nothing can be asked there.
        """
        self._stopping = True
        async with self._lock:
            if self._stopped:
                return
            await asyncio.gather(*(part.stop(grace_s) for part in self.parts))
            if self._extra is not None:
                await self._extra.delete()
            self._stopped = True
            if self._ended is not None:
                self._ended(self)

    def _named(self, part: RunningPart, reason: str) -> str:
        """Which of several it is about."""
        at = self.parts.index(part)
        return reason if at == 0 else f"part {at + 1} of {len(self.parts)} has ended: {reason}"
