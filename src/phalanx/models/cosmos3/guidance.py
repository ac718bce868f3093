"""Guidance: how the velocities of a prompt and of a negative prompt become one, also across ranks.

Over two ranks of a group `cfg` the first computes the branch of the prompt and the second the other
one's; a step's velocities then come together in one buffer, in one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.engine_config import get_engine_config
from phalanx.models.cosmos3.media import MediaRow, Velocity
from phalanx.parallel.current import current_mesh, default_mesh
from phalanx.parallel.mesh import Group
from phalanx.parallel.ops import all_gather
from phalanx.step.declaration import DEFAULT_LABEL

TOWARDS, AWAY = DEFAULT_LABEL, "away"
"""The branches, as the labels of their streams: of the prompt, and of the negative prompt."""
BOTH = "both"
"""The label under which all branches of a step are one."""


@dataclass(frozen=True)
class Guidance:
    """`scale` 1 guides nothing. `interval`: the timesteps that are guided, both ends included."""

    scale: float
    interval: tuple[int, int] | None = None

    @property
    def guides(self) -> bool:
        """Whether a negative prompt is read at all."""
        return self.scale != 1

    def guides_at(self, timestep: int) -> bool:
        """Whether the step at `timestep` is guided."""
        if self.interval is None:
            return self.guides
        low, high = self.interval
        return self.guides and low <= timestep <= high


def guided(towards: Velocity, away: Velocity, scale: float) -> Velocity:
    """From where the negative prompt leads, `scale` times the way to where the prompt does."""
    parts = zip(_parts(towards), _parts(away), strict=True)
    return _velocity(towards, (there + scale * (here - there) for here, there in parts))


@dataclass(frozen=True)
class BranchRanks:
    """The ranks that share the branches of guidance, and which of those are this rank's."""

    group: Group | None

    @classmethod
    def current(cls) -> BranchRanks:
        """Those of the current mesh; one rank with both branches where there is none."""
        mesh = current_mesh()
        if mesh is None and get_engine_config().parallel.infer_replica_world_size() == 1:
            return cls(None)
        group = default_mesh().group("cfg")
        return cls(group if group.size > 1 else None)

    @property
    def labels(self) -> tuple[str, ...]:
        """The branches that this rank computes."""
        return (TOWARDS, AWAY) if self.group is None else ((TOWARDS, AWAY)[self.group.rank],)

    @property
    def num_branches(self) -> int:
        """How many branches one rank computes."""
        return len(self.labels)

    def exchanged(
        self, rows: Sequence[MediaRow], own: Sequence[Velocity | None]
    ) -> tuple[list[Velocity], list[Velocity]]:
        """The velocities of both branches from this rank's `own`, of which None stands for nothing
        computed; the other ranks give those of the same `rows`.
        """
        assert self.group is not None
        flat = torch.cat([part.reshape(-1) for part in _all_parts(rows, own)])
        towards, away = all_gather(flat[None], self.group, 0).unbind(0)
        return _cut(towards, rows), _cut(away, rows)


def _all_parts(rows: Sequence[MediaRow], own: Sequence[Velocity | None]) -> Iterator[Tensor]:
    for row, velocity in zip(rows, own, strict=True):
        if velocity is None:
            yield from (torch.zeros_like(part) for part in _parts(row))
        else:
            yield from _parts(velocity)


def _cut(flat: Tensor, rows: Sequence[MediaRow]) -> list[Velocity]:
    """A buffer of all rows' velocities, as views of each."""
    sizes = [part.numel() for row in rows for part in _parts(row)]
    pieces = iter(torch.split(flat, sizes))
    return [_velocity(row, (next(pieces).view_as(part) for part in _parts(row))) for row in rows]


def _parts(one: MediaRow | Velocity) -> list[Tensor]:
    return [part for part in (one.vision, one.sound, one.actions) if part is not None]


def _velocity(like: MediaRow | Velocity, parts: Iterator[Tensor]) -> Velocity:
    return Velocity(
        next(parts),
        None if like.sound is None else next(parts),
        None if like.actions is None else next(parts),
    )
