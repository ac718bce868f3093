"""The promise that a step replays a captured shape: which shape, and on which of its slots."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True)
class BucketKey:
    """One captured shape of a node: so many rows and tokens of a walk, for one declaration.

    `walk` is the one that was captured, also where another walk replays it. `key` is what the node
    answered to `capture_key`. `region` names the captured part of a forward, where it is not whole.
    """

    walk: str
    rows: int
    tokens: int
    key: Hashable = None
    packed: bool = False
    """Whether rows of any lengths share the tokens; else all rows have equally many."""
    region: str | None = None


@dataclass(frozen=True)
class SlotLease:
    """A step's bucket and slot: its plans and inputs go into the static buffers of that slot.

    Slots are counted by node, not by bucket, since the buckets and regions of a node share the
    buffers of a slot. No two nodes have a slot of the same number, so that nodes that use one
    resource do not share buffers in it.
    """

    bucket: BucketKey
    slot: int


@dataclass(frozen=True)
class BufferClaim:
    """The static buffers that a node's captures need of its resources: for each of `num_slots`
    slots, room for the largest bucket.
    """

    num_slots: int
    max_rows: int
    max_tokens: int
