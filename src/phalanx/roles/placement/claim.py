"""What a group of replicas, or the trainer, needs of a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.schema.job_placement import TRAINER

GroupKey = tuple[str, str, int]
"""Role, model and the position of the group in it."""
TRAINER_KEY: GroupKey = (TRAINER, "", 0)


@dataclass(frozen=True)
class Claim:
    """`count` engines of `size` devices on `num_nodes` nodes each. `given` are the bundles that the
    group was given by hand, perhaps more than it needs. `place` is where the file says so.
    """

    key: GroupKey
    place: str
    size: int
    count: int
    num_nodes: int
    given: tuple[int, ...] = ()

    @property
    def user(self) -> str:
        return self.key[0]

    @property
    def num_devices(self) -> int:
        return len(self.given) or self.size * self.count
