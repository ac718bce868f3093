"""Watches one replica beside everything else: that it answers, and what others do to its engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from phalanx.roles.calls import attempt
from phalanx.roles.contracts import ALL_TAGS, EngineCallError, Tag
from phalanx.roles.replica import Replica
from phalanx.roles.residency import Residency
from phalanx.roles.role_state import RoleState
from phalanx.roles.weights import INITIAL_VERSION
from phalanx.routing.roles.snapshot import ReplicaState


class HealthWatch:
    """Of the replicas of one model. `lost` is told of one that no longer answers; `withdraw` of one
    whose memory somebody else has released; `has_version` of weights that a trainer has put in.
    """

    def __init__(
        self,
        role: RoleState,
        lost: Callable[[Replica, str], None],
        withdraw: Callable[[Replica, str], None],
        has_version: Callable[[Replica, str], None],
    ) -> None:
        self._role = role
        self._lost = lost
        self._withdraw = withdraw
        self._has_version = has_version

    async def run(self, replica: Replica) -> None:
        """Goes on until it is cancelled, or the replica is dead."""
        times, num_failures = self._role.deployment, 0
        while replica.is_alive:
            await asyncio.sleep(times.health_interval_s)
            if replica.state is not ReplicaState.READY or replica.busy:
                num_failures = 0
                if replica.waits:
                    await self._look(replica)
                continue
            if await self._answers(replica):
                num_failures = 0
                await self._look(replica)
            elif replica.state is ReplicaState.READY and not replica.busy:
                num_failures += 1
                if num_failures >= times.max_health_failures:
                    self._lost(replica, f"it failed {num_failures} health checks in a row")
                    return

    async def _answers(self, replica: Replica) -> bool:
        what = f"{replica.engine_id}: health"
        try:
            timeout_s = self._role.deployment.health_timeout_s
            return await attempt(replica.engine.healthy, what, timeout_s)
        except EngineCallError:
            return False

    async def _look(self, replica: Replica) -> None:
        """At what somebody else may have changed, where no operation has changed it meanwhile."""
        timeout_s = self._role.deployment.health_timeout_s
        engine, name = replica.engine, replica.engine_id
        before = replica.state, replica.weights, replica.busy
        held = version = None
        try:
            if replica.tells:
                held = await attempt(engine.resident, f"{name}: memory", timeout_s)
                replica.tells = held is not None
            if replica.is_dynamic:
                version = await attempt(engine.weight_version, f"{name}: weights", timeout_s)
        except EngineCallError:
            return
        if before != (replica.state, replica.weights, replica.busy):
            return
        if replica.state is ReplicaState.READY and held is not None and held != ALL_TAGS:
            replica.residency = Residency(held)
            if replica.is_dynamic and Tag.WEIGHTS not in held:
                replica.lose_weights()
            # Whoever did that has paused it, and may have it go on again.
            replica.runs, replica.drained = None, False
            self._withdraw(replica, "somebody else has released its memory")
        elif replica.is_external and _was_started_anew(replica, version):
            self._lost(
                replica,
                f"it says that it has weights {version!r} instead of {replica.weights!r}: somebody"
                " has started it anew",
            )
        elif version is not None and version not in (replica.weights, _old(replica)):
            self._has_version(replica, version)


def _was_started_anew(replica: Replica, version: str | None) -> bool:
    """Whether one that has named its weights has those again that engines start with."""
    if version is not None and version == replica.weights:
        replica.names_weights = True
    return replica.names_weights and version == INITIAL_VERSION != replica.weights


def _old(replica: Replica) -> str:
    """What a replica without its weights says nevertheless."""
    return replica.lost_weights or INITIAL_VERSION
