"""What keeps the ranks of a replica together: they begin alike, or end together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.errors import PhalanxDistError
from phalanx.parallel.mesh import Group
from phalanx.parallel.ops import all_gather
from phalanx.step.together import Together


class Lockstep(Together):
    """The ranks of a replica; `world` None for one rank alone."""

    def __init__(self, world: Group | None) -> None:
        super().__init__(1 if world is None else world.size)
        self._world = world

    def require_same(self, rids: Sequence[str], latents: Sequence[Sequence[Tensor]]) -> None:
        """Refuse to begin requests whose `latents`, float32, differ between ranks.

        One small exchange for all. Raises `PhalanxDistError`, on every rank.
        """
        if self._world is None or not rids:
            return
        own = torch.stack([_checksum(parts) for parts in latents])
        of_rank = all_gather(own[None], self._world, 0).tolist()
        for place, rid in enumerate(rids):
            others = [rank for rank, row in enumerate(of_rank) if row[place] != of_rank[0][place]]
            if others:
                raise PhalanxDistError(
                    f"request {rid!r} begins with other latents on rank {others[0]} than on rank 0; "
                    "noise is drawn alike on all ranks, so these run different versions, or one "
                    "computes wrongly. Restart the replica with the same software on every rank"
                )


def _checksum(parts: Sequence[Tensor]) -> Tensor:
    """A number of all bits: int64, on the device of `parts`."""
    sums = [part.contiguous().view(torch.int32).sum(dtype=torch.int64) for part in parts]
    return torch.stack(sums).sum()
