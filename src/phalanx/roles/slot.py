"""The place of one replica in its model's pool, through all of its generations."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from phalanx.roles.contracts import Tag
from phalanx.roles.replica import Replica


@dataclass(eq=False)
class Slot:
    """`replica` is the published one. `remains` are not known to be gone altogether: nothing is
    started here before they are. `generation` counts the starts. `revival` brings up the next one
    after a death. `restart`: that is wanted with the next wake, whatever the model says.
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
    def dead(self) -> tuple[Replica, ...]:
        """Those of which something is left."""
        published = self.replica
        if published is None or published.is_alive or published.is_gone:
            return tuple(self.remains)
        return tuple(dict.fromkeys([*self.remains, published]))

    @property
    def is_free(self) -> bool:
        """Whether nothing is left here that holds anything."""
        left = [*self.remains, *([self.replica] if self.replica else [])]
        return all(replica.is_stopped or replica.written_off for replica in left)

    @property
    def is_revived(self) -> bool:
        return self.revival is not None and not self.revival.done()

    def holds(self) -> frozenset[Tag] | None:
        """What is held here; None where nobody is certain."""
        if self.is_free:
            return frozenset()
        replica = self.replica
        if replica is None or not replica.is_alive or not replica.residency.is_certain:
            return None
        return replica.residency.held

    async def end_revival(self) -> None:
        """What it had begun is taken down when this returns."""
        if self.revival is not None:
            self.revival.cancel()
            await asyncio.wait([self.revival])
