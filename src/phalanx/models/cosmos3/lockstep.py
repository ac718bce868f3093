"""What keeps the ranks of a replica together, or ends them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from phalanx.errors import InvalidRequestError, PhalanxDistError, RequestFailedError
from phalanx.parallel.mesh import Group
from phalanx.parallel.ops import all_gather
from phalanx.step.attempt import attempt

T = TypeVar("T")


class Lockstep:
    """The ranks of a replica; `world` None for one rank alone.

    What breaks a step may have broken it on this rank only, while the others wait for it in a
    collective: this rank then computes nothing more, and its service ends the replica.
    """

    def __init__(self, world: Group | None) -> None:
        self._world = world
        self.failure: Exception | None = None
        """Why this rank cannot go on with the others."""

    def run(self, compute: Callable[[], T]) -> T:
        """Compute a step's part that other ranks take part in."""
        if self._world is None:
            return compute()
        if self.failure is not None:
            raise self.failure
        made = attempt(compute)
        if made.error is not None:
            self.note(made.error)
            raise made.error
        assert made.value is not None
        return made.value

    def note(self, error: Exception) -> None:
        """Take what a request ended in. What is wrong with the request is so on every rank."""
        if self._world is None or isinstance(error, (InvalidRequestError, RequestFailedError)):
            return
        if self.failure is None:
            self.failure = error

    def check(self) -> None:
        """Raise `PhalanxDistError` where this rank cannot go on with the others."""
        if isinstance(self.failure, PhalanxDistError):
            raise self.failure
        if self.failure is not None:
            raise PhalanxDistError(
                f"a step failed on this rank, which leaves the others waiting for it: {self.failure}"
            ) from self.failure

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
