"""Takes one replica from state to state: drains it, puts it to sleep, wakes it.

A step that failed is undone where that can be made certain; where it cannot, the replica is blocked,
and nobody asks its engine for anything until somebody has found out. It is never killed for it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

from phalanx.errors import RoleOperationFailedError, RoleOperationRefusedError
from phalanx.roles.calls import Deadline, PollPause, attempt, insist
from phalanx.roles.contracts import ALL_TAGS, EngineCallError, Tag
from phalanx.roles.memory import NUM_TRIES, release, resume
from phalanx.roles.quiescence import (
    SETTLE_S,
    TURN_SETTLE_S,
    go_on,
    quiet,
    run_dry,
)
from phalanx.roles.replica import Replica
from phalanx.roles.residency import Residency
from phalanx.roles.role_state import RoleState
from phalanx.roles.router_link import RouterLink
from phalanx.roles.weights import ModelWeights, holds_weights
from phalanx.routing.roles.snapshot import ReplicaState
from phalanx.schema.roles import PlacementMode

TOKEN_TIMEOUT_S = 30.0
"""For an engine's first token."""


class Lifecycle:
    """Of the replicas of one model. `lost` is told where nobody listens any more."""

    def __init__(
        self,
        role: RoleState,
        weights: ModelWeights,
        router: RouterLink,
        lost: Callable[[Replica, str], None],
    ) -> None:
        self._deployment = role.deployment
        self._weights = weights
        self._router = router
        self._publish = role.publish
        self._heard = role.heard
        self._lost = lost

    def withdraw(self, replicas: Iterable[Replica], detail: str = "") -> None:
        """Tell everybody, before anything is done to them, that these get no more requests."""
        for replica in replicas:
            if replica.state is ReplicaState.READY:
                replica.move(ReplicaState.DRAINING, detail)
        self._publish()

    async def drain(self, replica: Replica, timeout_s: float | None = None) -> None:
        """Have nothing run at one that is DRAINING."""
        self._check_blocked(replica)
        if not replica.drained:
            async with self._blocking(replica, "it could not be drained"):
                await self._run_dry(replica, timeout_s)

    async def sleep(self, replica: Replica) -> None:
        """From DRAINING or ONLOADING to SLEEPING, with nothing held."""
        self._check_blocked(replica)
        async with self._blocking(replica, "it could not be put to sleep"):
            if replica.state is ReplicaState.DRAINING and not replica.drained:
                await self._run_dry(replica, None)
            await self._rest(replica)
            await release(replica, ALL_TAGS, self._deployment.offload_timeout_s)
            replica.advance(ReplicaState.SLEEPING)
        replica.waits = False
        self._publish()

    async def wake(self, replica: Replica, tags: frozenset[Tag] = ALL_TAGS) -> None:
        """From DRAINING, SLEEPING or ONLOADING to READY, or to ONLOADING while tags or a trainer's
        weights are missing.
        """
        self._check_blocked(replica)
        if replica.state is ReplicaState.DRAINING:
            await self.drain(replica)
            # It still holds everything, and there is no other way back.
            replica.advance(ReplicaState.SLEEPING)
            keeps: frozenset[Tag] = frozenset()
        else:
            keeps = replica.residency.held
        if replica.state is ReplicaState.SLEEPING:
            replica.advance(ReplicaState.ONLOADING)
            self._publish()
        async with replica.living():
            try:
                await self._take(replica, tags)
                await self.finish(replica)
            except EngineCallError as error:
                await self._give_back(replica, keeps, error)

    async def finish(self, replica: Replica) -> None:
        """Have it serve, if nothing is missing: from STARTING or ONLOADING to READY.

        Raises `EngineCallError`.
        """
        if replica.residency.is_complete and not replica.waits:
            await self.admit(replica)
            replica.advance(ReplicaState.READY)
        self._publish()

    async def serve(self, replica: Replica) -> None:
        """As `finish`, once it has its weights; what fails can be tried again.

        Raises `RoleOperationFailedError`.
        """
        self._check_blocked(replica)
        try:
            async with replica.living():
                await self.get_weights(replica)
                await self.finish(replica)
        except EngineCallError as error:
            replica.detail = str(error)
            self._publish()
            raise RoleOperationFailedError(f"{replica.engine_id}: {error}") from error

    async def admit(self, replica: Replica) -> None:
        """What comes between an engine that is whole and its publication."""
        limit_s = self._deployment.startup_timeout_s
        deadline = Deadline(limit_s)
        await go_on(replica, deadline)
        await wait_until(
            replica.engine.ready,
            f"{replica.engine_id}: is it ready",
            deadline,
            min(TOKEN_TIMEOUT_S, limit_s / NUM_TRIES),
        )
        await self._router.add(replica)

    async def get_weights(self, replica: Replica) -> None:
        """Its model's weights, or the word that it waits for them. Raises `EngineCallError`."""
        if await self._weights.sync(replica):
            replica.waits, replica.detail = False, ""
        else:
            version = self._weights.version
            replica.wait_for_weights("the trainer's weights" + (f" {version!r}" if version else ""))

    async def find_out(self, replica: Replica, holds: frozenset[Tag] | None) -> None:
        """Make certain what a blocked replica holds, and unblock it.

        Raises `RoleOperationFailedError` where nobody can say.
        """
        if holds is None and not replica.residency.is_certain:
            what = f"{replica.engine_id}: memory"
            try:
                async with replica.living():
                    holds = await insist(
                        replica.engine.resident,
                        what,
                        Deadline(self._deployment.offload_timeout_s),
                    )
            except EngineCallError as error:
                raise RoleOperationFailedError(f"{error}; it stays blocked") from error
            if holds is None:
                raise RoleOperationFailedError(
                    f"{replica.engine_id} cannot say what it holds and stays blocked; recover it,"
                    " or say what it holds"
                )
        replica.check_alive()
        if holds is not None:
            replica.residency = Residency(holds)
        replica.runs = None
        replica.unblock()

    async def _run_dry(self, replica: Replica, timeout_s: float | None) -> None:
        await self._router.remove(replica)
        if not await self._can_run(replica):
            return
        times = self._deployment
        limit_s = times.drain_timeout_s if timeout_s is None else timeout_s
        if limit_s > 0:
            await self._heard()
        takes_turns = times.placement is PlacementMode.DEFER
        settle_s = TURN_SETTLE_S if takes_turns else SETTLE_S
        await run_dry(replica, limit_s, times.offload_timeout_s, settle_s)

    async def _can_run(self, replica: Replica) -> bool:
        """Without its cache it runs nothing, nor can that be asked. Somebody else who has released
        memory may have taken it back since.
        """
        if replica.tells and not replica.residency.is_complete:
            deadline = Deadline(self._deployment.offload_timeout_s)
            what = f"{replica.engine_id}: memory"
            held = await insist(replica.engine.resident, what, deadline)
            if held is not None:
                replica.residency = Residency(held)
        return Tag.KV_CACHE in replica.residency.held

    async def _rest(self, replica: Replica) -> None:
        has_cache = Tag.KV_CACHE in replica.residency.held
        if not has_cache or replica.runs is not False or not replica.drained:
            await quiet(replica, Deadline(self._deployment.offload_timeout_s))

    async def _take(self, replica: Replica, tags: frozenset[Tag]) -> None:
        limit_s = self._deployment.offload_timeout_s
        if replica.is_dynamic:
            # New weights go in before the cache takes its memory.
            had_them = holds_weights(replica)
            await resume(replica, tags & {Tag.WEIGHTS}, limit_s)
            if holds_weights(replica):
                if not had_them:
                    await self._weights.note_lost(replica)
                await self.get_weights(replica)
        await resume(replica, tags, limit_s)

    async def _give_back(
        self, replica: Replica, keeps: frozenset[Tag], error: EngineCallError
    ) -> None:
        """Undo a wake that failed. Always raises."""
        replica.waits = False
        if error.gone or not replica.residency.is_certain:
            async with self._blocking(replica, "it could not be woken"):
                raise error
        async with self._blocking(replica, f"it could not be woken ({error}), nor put back"):
            await self._router.remove(replica)
            if replica.runs is not False:
                await quiet(replica, Deadline(self._deployment.offload_timeout_s))
            surplus = replica.residency.held - keeps
            await release(replica, surplus, self._deployment.offload_timeout_s)
            replica.check_alive()
            if replica.residency.is_empty:
                replica.move(ReplicaState.SLEEPING, str(error))
            else:
                replica.detail = str(error)
        self._publish()
        raise RoleOperationFailedError(f"{error}; what it had taken was given back") from error

    def _check_blocked(self, replica: Replica) -> None:
        if replica.blocked:
            raise RoleOperationRefusedError(
                f"{replica.engine_id} is blocked ({replica.blocked}); unblock or recover it"
            )

    @asynccontextmanager
    async def _blocking(self, replica: Replica, what: str) -> AsyncIterator[None]:
        """What its engine does not do in here, or nobody knows of, blocks the replica."""
        try:
            async with replica.living():
                yield
        except EngineCallError as error:
            if error.gone:
                self._lost(replica, str(error))
                replica.check_alive()
            replica.block(f"{what}: {error}")
            self._publish()
            raise RoleOperationFailedError(f"{replica.engine_id}: {replica.blocked}") from error


async def wait_until(
    ask: Callable[[], Awaitable[bool]],
    what: str,
    deadline: Deadline,
    call_timeout_s: float,
    at_first_no: Callable[[], None] | None = None,
) -> None:
    """Ask until the answer is yes; no answer counts as no. Raises `EngineCallError` at the end."""
    poll = PollPause()
    while True:
        try:
            if await attempt(ask, what, min(call_timeout_s, max(deadline.left_s, 1.0))):
                return
            last = EngineCallError(f"{what}: no", uncertain=False)
        except EngineCallError as error:
            last = error
        if deadline.passed:
            raise last
        if at_first_no is not None:
            at_first_no()
            at_first_no = None
        await poll.rest()
