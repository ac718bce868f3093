"""The place of one replica in its model's pool, through all of its generations."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from phalanx.roles.contracts import Tag
from phalanx.roles.replica import Replica


@dataclass(eq=False)
class Slot:
    """`replica` is the published one. `remains` never were, or are no more, and their processes are
    not known to be gone: nothing is started here before they are. `generation` counts the starts.
    `revival` brings up the next generation of a dead one. `restart`: an operator wants that with the
    next wake.
    """

    engine_id: str
    group_index: int
    ordinal: int
    generation: int = 0
    replica: Replica | None = None
    remains: list[Replica] = field(default_factory=list)
    revival: asyncio.Task[None] | None = None
    restart: bool = False

    @property
    def is_dead(self) -> bool:
        return self.replica is not None and not self.replica.is_alive

    @property
    def is_free(self) -> bool:
        """Whether nothing is left here that holds anything."""
        return not self.remains and (self.replica is None or self.replica.is_stopped)

    @property
    def is_revived(self) -> bool:
        return self.revival is not None and not self.revival.done()

    def holds(self) -> frozenset[Tag] | None:
        """What is held here; None where nobody is certain."""
        replica = self.replica
        if self.remains or replica is None or not replica.is_alive:
            return frozenset() if self.is_free else None
        return replica.residency.held if replica.residency.is_certain else None

    async def end_revival(self) -> None:
        """What it had begun is taken down when this returns."""
        if self.revival is not None:
            self.revival.cancel()
            await asyncio.wait([self.revival])
