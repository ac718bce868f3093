"""Makes a replica ready to be published, step by step, and takes one down again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine

from phalanx.errors import PhalanxError, RoleOperationFailedError
from phalanx.roles.calls import CALL_TIMEOUT_S, Deadline, attempt, insist
from phalanx.roles.contracts import ALL_TAGS, EngineCallError, LaunchedReplica, ReplicaLaunch
from phalanx.roles.events import EventKind
from phalanx.roles.lifecycle import Lifecycle, wait_until
from phalanx.roles.memory import resume
from phalanx.roles.replica import Replica
from phalanx.roles.residency import Residency
from phalanx.roles.role_state import RoleState
from phalanx.roles.router_link import RouterLink
from phalanx.roles.slot import Slot
from phalanx.schema.roles import InferenceModelSpec

logger = logging.getLogger(__name__)
STOP_GRACE_S = 10.0
STOP_TIMEOUT_S = 30.0
"""Beyond the grace; after that a replica's processes are not known to be gone."""


class ReplicaMaker:
    """For the replicas of one model. `lost` is told of each that ends by itself, and `watch` runs
    beside each for as long as it lives.
    """

    def __init__(
        self,
        role: RoleState,
        model: InferenceModelSpec,
        lifecycle: Lifecycle,
        router: RouterLink,
        lost: Callable[[Replica, str], None],
        watch: Callable[[Replica], Coroutine[object, object, None]],
    ) -> None:
        self._role = role
        self._model = model
        self._lifecycle = lifecycle
        self._router = router
        self._lost = lost
        self._watch = watch

    async def prepare(self, slot: Slot) -> Replica:
        """A new generation, started and healthy. Nothing is left of one that does not get there,
        but in `slot.remains`.
        """
        await self._clear(slot)
        replica = await self._launch(slot)
        try:
            async with replica.living():
                await self._come_up(replica)
        except BaseException as error:
            why = str(error) or "it was interrupted"
            await self.take_down(slot, replica, f"it did not start: {why}", 0.0)
            raise
        return replica

    async def admit(self, replica: Replica) -> None:
        """Weights, then the router: all that comes before its publication. Where weights have to
        come from a trainer, it waits for them instead.
        """
        async with replica.living():
            await self._lifecycle.get_weights(replica)
            if not replica.waits:
                await self._lifecycle.admit(replica)

    async def take_down(self, slot: Slot, replica: Replica, reason: str, grace_s: float) -> bool:
        """Stopped, and out of the router: False where either is not certain, so that it stays among
        the slot's remains. Any number of times.
        """
        if replica.is_alive:
            replica.lose(reason)
        if replica not in slot.remains and not replica.is_gone:
            slot.remains.append(replica)
        watches = tuple(replica.tasks)
        for task in watches:
            task.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        problems = [await self._unroute(replica), await self._stop(replica, grace_s)]
        if any(problems):
            replica.block("; ".join(filter(None, problems)))
            return False
        replica.unblock()
        if replica in slot.remains:
            slot.remains.remove(replica)
            await _close(replica)
        return True

    async def _unroute(self, replica: Replica) -> str:
        """What is wrong, or nothing."""
        try:
            await self._router.remove(replica, Deadline(CALL_TIMEOUT_S))
        except EngineCallError as error:
            return str(error)
        return ""

    async def _stop(self, replica: Replica, grace_s: float) -> str:
        """What is wrong, or nothing."""
        if replica.is_stopped:
            return ""
        limit_s = grace_s + STOP_TIMEOUT_S
        try:
            async with asyncio.timeout(limit_s):
                await replica.handle.stop(grace_s)
        except (TimeoutError, OSError, PhalanxError) as error:
            words = str(error) or f"they still run {limit_s:g} s later"
            return f"its processes could not be stopped: {words}"
        replica.is_stopped = True
        replica.residency = Residency(frozenset())
        return ""

    async def _clear(self, slot: Slot) -> None:
        """Raises where something of an earlier generation is left, which may hold memory."""
        old = slot.replica
        if old is not None and not old.is_gone and old not in slot.remains:
            slot.remains.append(old)
        for replica in tuple(slot.remains):
            if not await self.take_down(slot, replica, "it is replaced", 0.0):
                raise RoleOperationFailedError(f"{slot.engine_id}: {replica.blocked}")

    async def _launch(self, slot: Slot) -> Replica:
        slot.generation += 1
        launch = ReplicaLaunch(
            role=self._role.spec.role,
            engine_id=slot.engine_id,
            generation=slot.generation,
            model=self._model,
            group=self._model.engine_groups[slot.group_index],
            group_index=slot.group_index,
            ordinal=slot.ordinal,
        )
        try:
            handle = await attempt(
                lambda: self._role.backends.launcher.launch(launch),
                f"start {slot.engine_id}",
                self._role.deployment.startup_timeout_s,
            )
        except OSError as error:
            raise RoleOperationFailedError(
                f"{slot.engine_id} could not be started: {error}"
            ) from error

        def tell(kind: EventKind, detail: str) -> None:
            self._role.tell(kind, detail, model=self._model.name, engine_id=slot.engine_id)

        tell(EventKind.GENERATION, str(slot.generation))
        replica = Replica(launch, handle, self._role.backends.connect(handle.url), tell)
        for act in (self._watch_exit(replica, handle), self._watch(replica)):
            task = asyncio.create_task(act)
            replica.tasks.add(task)
            task.add_done_callback(replica.tasks.discard)
            task.add_done_callback(_log_fault)
        return replica

    async def _watch_exit(self, replica: Replica, handle: LaunchedReplica) -> None:
        reason = await handle.exited()
        self._lost(replica, reason)

    async def _come_up(self, replica: Replica) -> None:
        times = self._role.deployment
        deadline = Deadline(times.startup_timeout_s)
        name = replica.engine_id
        try:
            await wait_until(
                replica.engine.healthy,
                f"{name}: is it healthy",
                deadline,
                times.health_timeout_s,
                lambda: self._tell_of_absence(replica),
            )
        except EngineCallError as error:
            raise _named_failure(replica, error, times.startup_timeout_s) from error
        if replica.is_external:
            # Somebody else runs it, and may have paused it, or put it to sleep.
            replica.runs = None
            held = await insist(replica.engine.resident, f"{name}: memory", deadline)
            if held is not None:
                replica.residency = Residency(held)
                await resume(replica, ALL_TAGS, times.offload_timeout_s)

    def _tell_of_absence(self, replica: Replica) -> None:
        """Of one that somebody else has to start, and nobody's log tells of."""
        if replica.is_external:
            limit_s = self._role.deployment.startup_timeout_s
            where = f"until somebody serves at {replica.handle.url}, for at most {limit_s:g} s"
            self._tell(replica, EventKind.WAITING, where)

    def _tell(self, replica: Replica, kind: EventKind, detail: str) -> None:
        self._role.tell(kind, detail, model=self._model.name, engine_id=replica.engine_id)


def _named_failure(replica: Replica, error: EngineCallError, limit_s: float) -> EngineCallError:
    """With the address and the time that it had, and what can be done."""
    words = f"{error} (at {replica.handle.url}, for startup_timeout_s={limit_s:g})"
    if replica.is_external:
        words += "; start the engine there, or change its url in urls"
    return EngineCallError(words, uncertain=error.uncertain, gone=error.gone)


async def _close(replica: Replica) -> None:
    # Perhaps nobody is there any more.
    with contextlib.suppress(EngineCallError):
        await attempt(
            replica.engine.close, f"{replica.engine_id}: close its connections", CALL_TIMEOUT_S
        )


def _log_fault(task: asyncio.Task[None]) -> None:
    """A watch that ends by an error is a fault of ours, which must not stay unknown."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        logger.error("the watch of a replica failed", exc_info=error)
