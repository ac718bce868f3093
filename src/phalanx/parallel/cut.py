"""Cuts one rank's part out of whole weights, in memory or in a mapped file."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from phalanx.parallel.sharding import WeightShard


class Sliceable(Protocol):
    """A tensor, or what `safetensors` gives for one that is not read yet (`get_slice`)."""

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor: ...


def cut_weight(whole: Sliceable, shard: WeightShard) -> Tensor:
    """The part of a weight [rows, columns]; a view where `whole` is a tensor and rows are one span."""
    parts = [whole[rows.slice, shard.columns.slice] for rows in shard.rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def cut_bias(whole: Sliceable, shard: WeightShard) -> Tensor | None:
    """The part of a bias [rows]; None on a rank that does not hold it."""
    if not shard.holds_bias:
        return None
    parts = [whole[(rows.slice,)] for rows in shard.rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
