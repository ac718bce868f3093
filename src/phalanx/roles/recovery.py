"""What follows a death: the dead is stopped for certain, then a new generation takes its place."""

from __future__ import annotations

import asyncio
import logging

from phalanx.errors import PhalanxError, RoleOperationFailedError
from phalanx.roles.candidates import Candidates
from phalanx.roles.events import EventKind
from phalanx.roles.maker import ReplicaMaker
from phalanx.roles.residency import Residency
from phalanx.roles.role_state import RoleState
from phalanx.roles.router_link import RouterLink
from phalanx.roles.slot import Slot
from phalanx.schema.roles import InferenceModelSpec

logger = logging.getLogger(__name__)
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0


class Recovery:
    """Of one model. Without fault tolerance a dead replica stays dead, and no process of it stays."""

    def __init__(
        self, role: RoleState, model: InferenceModelSpec, maker: ReplicaMaker, router: RouterLink
    ) -> None:
        self._role = role
        self._model = model
        self._maker = maker
        self._router = router

    def begin(self, slot: Slot) -> None:
        """Its published replica has died. Goes on by itself, until it is done or ended."""
        if not self._role.closed and not slot.is_revived:
            slot.revival = asyncio.create_task(self._revive(slot))
            slot.revival.add_done_callback(_log_fault)

    def clear_away(self, slot: Slot) -> None:
        """Of a slot that is the model's no more: stop what is left there, until it is gone."""
        if slot.remains and not self._role.closed and not slot.is_revived:
            slot.revival = asyncio.create_task(self._clear_away(slot))
            slot.revival.add_done_callback(_log_fault)

    def is_wanted(self, slot: Slot) -> bool:
        """Whether a new generation is to take the place of the dead one."""
        return slot.is_dead and (self._model.fault_tolerance_enabled or slot.restart)

    async def bury(self, slot: Slot) -> None:
        """Stop what is left of the dead. Raises where its processes are not known to be gone, and may
        hold something.
        """
        left = slot.dead
        if not left:
            return
        for each in left:
            await self._maker.take_down(slot, each, "", 0.0)
        self._role.publish()
        unclear = [each for each in left if each.blocked and not each.written_off]
        if unclear:
            raise RoleOperationFailedError(f"{slot.engine_id}: {unclear[0].blocked}")

    def write_off(self, slot: Slot) -> None:
        """On somebody's word, no process of the dead is left that holds anything. Those that may run
        yet are stopped before another one is started in the slot.
        """
        for dead in slot.dead:
            dead.written_off, dead.residency = True, Residency(frozenset())
        self._role.publish()

    async def _revive(self, slot: Slot) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await self.bury(slot)
                if not (self._role.serves and self.is_wanted(slot)):
                    return
                if await self._bring_up(slot):
                    return
            except (PhalanxError, OSError) as error:
                self._tell_pause(slot, pause_s, str(error))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _clear_away(self, slot: Slot) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            for replica in tuple(slot.remains):
                await self._maker.take_down(slot, replica, "", 0.0)
            if not slot.remains:
                return
            self._tell_pause(slot, pause_s, slot.remains[0].blocked)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _bring_up(self, slot: Slot) -> bool:
        """False where it was wanted no more when it had come up."""
        async with Candidates(self._maker, self._router) as candidates:
            await candidates.prepare([slot])
            async with self._role.lock:
                if not (self._role.serves and self.is_wanted(slot)):
                    return False
                await candidates.admit()
                candidates.commit()
                self._role.publish()
        return True

    def _tell_pause(self, slot: Slot, pause_s: float, why: str) -> None:
        self._role.tell(
            EventKind.FAILED,
            f"it is tried again in {pause_s:g} s: {why}",
            model=self._model.name,
            engine_id=slot.engine_id,
        )


def _log_fault(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        logger.error("a recovery failed", exc_info=error)
