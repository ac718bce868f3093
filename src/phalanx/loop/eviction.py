"""Whose state is moved to the host first when memory runs out.

A policy sees only what the loop decides by: ranks, turns and what resources hold. So all ranks of a
replica choose the same victims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request whose state could be moved.

    `rank` and `turn` as in `LoopRequest`. `in_batch`: the step that ran out of room computes it.
    `offload_priority` is the measure of the resource that ran out.
    """

    rid: str
    rank: tuple[int, int]
    turn: int
    in_batch: bool
    offload_priority: float


class EvictionPolicy(Protocol):
    """Puts candidates in the order in which they are tried."""

    def order(self, candidates: Sequence[Candidate]) -> list[Candidate]: ...


class LeastRecentlyUsed:
    """Those computed longest ago first; of lower priority, and outside the step, before that."""

    def order(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        return sorted(candidates, key=lambda one: (-one.rank[0], one.in_batch, one.turn, one.rank))


class Priority:
    """Those with the highest `offload_priority` first; of lower request priority, and outside the
    step, before that.
    """

    def order(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        return sorted(
            candidates,
            key=lambda one: (
                -one.rank[0],
                one.in_batch,
                -one.offload_priority,
                one.turn,
                one.rank,
            ),
        )


EVICTION_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "priority": Priority,
}
