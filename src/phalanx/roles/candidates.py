"""New replicas that nobody is told of before all of them are whole; one that fails undoes them all."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Self

from phalanx.roles.maker import ReplicaMaker
from phalanx.roles.replica import Replica
from phalanx.roles.router_link import RouterLink
from phalanx.roles.slot import Slot
from phalanx.roles.together import all_or_first_error
from phalanx.routing.roles.snapshot import ReplicaState


class Candidates:
    """Of one model. What was made and not committed is taken down where the block ends."""

    def __init__(self, maker: ReplicaMaker, router: RouterLink) -> None:
        self._maker = maker
        self._router = router
        self._slots: tuple[Slot, ...] = ()
        self._made: dict[Slot, Replica] = {}
        self._opened = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        slots, made = self._slots, self._made
        self._slots, self._made = (), {}
        await all_or_first_error(self._discard(slot, made.get(slot)) for slot in slots)
        if self._opened:
            self._opened = False
            await self._router.close()

    async def make(self, slots: Iterable[Slot]) -> None:
        """Have one in each of these, ready to be published."""
        await self.prepare(slots)
        await self.admit()

    async def prepare(self, slots: Iterable[Slot]) -> None:
        """Start them and wait until they are healthy."""
        self._slots = tuple(slots)
        self._opened = await self._router.open()
        await all_or_first_error(self._prepare(slot) for slot in self._slots)

    async def admit(self) -> None:
        """Give them weights, and to the router."""
        await all_or_first_error(self._maker.admit(replica) for replica in self._made.values())

    def check_alive(self) -> None:
        """Raises where one of them has died meanwhile."""
        for replica in self._made.values():
            replica.check_alive()

    def commit(self) -> None:
        """Put them in their slots, to be published; none of them where one has died meanwhile."""
        self.check_alive()
        for slot, replica in self._made.items():
            slot.replica, slot.restart = replica, False
            if not replica.waits:
                replica.move(ReplicaState.READY)
        self._slots, self._made, self._opened = (), {}, False

    async def _prepare(self, slot: Slot) -> None:
        self._made[slot] = await self._maker.prepare(slot)

    async def _discard(self, slot: Slot, made: Replica | None) -> None:
        """With what is left of one that failed, and could not be taken down to the end."""
        for replica in {*slot.remains, *([made] if made else [])}:
            await self._maker.take_down(slot, replica, "others could not be started", 0.0)
