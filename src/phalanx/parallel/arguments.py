"""Refuses wrong arguments of collective calls, as far as one rank can see that they are wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.errors import PhalanxDistError
from phalanx.parallel.collectives.base import GroupCollectives, ReduceOp
from phalanx.parallel.mesh import Group

_OPS = tuple(f"ReduceOp.{op.name}" for op in ReduceOp)


def check_tensor(call: str, x: Tensor, collectives: GroupCollectives) -> None:
    """Refuse what this backend cannot carry."""
    if x.device.type != collectives.device_type:
        raise PhalanxDistError(
            f"{call} got a tensor on {x.device}, but the ranks of this group communicate on "
            f"{collectives.device_type}; move it there first"
        )


def check_reduction(call: str, x: Tensor, op: object) -> None:
    """Refuse reductions that are not known, or not defined for the dtype."""
    if not isinstance(op, ReduceOp):
        raise PhalanxDistError(f"{call}: op={op!r} is not a ReduceOp; allowed: {', '.join(_OPS)}")
    if x.dtype == torch.bool:
        raise PhalanxDistError(f"{call} cannot reduce booleans; convert the tensor to int32 first")


def check_rank(name: str, rank: int, group: Group) -> None:
    """`rank` must be a position in the group."""
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < group.size:
        raise PhalanxDistError(
            f"{name}={rank!r} is not a position in {group.name}, whose ranks are "
            f"{group.members}; allowed: 0 to {group.size - 1}"
        )


def check_other_rank(name: str, rank: int, group: Group) -> None:
    """`rank` must not be this rank itself."""
    if rank == group.rank:
        raise PhalanxDistError(
            f"{name}={rank} is this rank itself in {group.name}; it can exchange with others only"
        )


def dimension(call: str, x: Tensor, dim: int) -> int:
    """`dim` counted from the front."""
    if not -x.dim() <= dim < x.dim():
        raise PhalanxDistError(
            f"{call}: dim={dim} does not exist in a tensor of shape {tuple(x.shape)}"
        )
    return dim % x.dim()


def check_sizes(x: Tensor, dim: int, sizes: tuple[int, ...], group: Group) -> None:
    """`sizes` must have an entry a rank, this rank's being what it holds."""
    _check_counts("all_gather: sizes", sizes, group)
    if sizes[group.rank] != x.shape[dim]:
        raise PhalanxDistError(
            f"all_gather: sizes={sizes} say {sizes[group.rank]} for position {group.rank} of "
            f"{group.name}, but its tensor {tuple(x.shape)} has {x.shape[dim]} along dimension "
            f"{dim}"
        )


def splits(
    rows: int, in_splits: tuple[int, ...] | None, out_splits: tuple[int, ...] | None, group: Group
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The rows to send to and to receive from each rank; even where none are given."""
    if in_splits is None and out_splits is None:
        if rows % group.size:
            raise PhalanxDistError(
                f"all_to_all cannot divide {rows} rows among the {group.size} ranks of "
                f"{group.name}; give in_splits and out_splits"
            )
        even = (rows // group.size,) * group.size
        return even, even
    if in_splits is None or out_splits is None:
        raise PhalanxDistError("all_to_all needs both in_splits and out_splits, or neither")
    _check_counts("all_to_all: in_splits", in_splits, group)
    _check_counts("all_to_all: out_splits", out_splits, group)
    if sum(in_splits) != rows:
        raise PhalanxDistError(
            f"all_to_all: in_splits={in_splits} add up to {sum(in_splits)}, but the tensor has "
            f"{rows} rows"
        )
    if in_splits[group.rank] != out_splits[group.rank]:
        raise PhalanxDistError(
            f"all_to_all: in_splits={in_splits} and out_splits={out_splits} differ at position "
            f"{group.rank}, which is this rank's share with itself"
        )
    return in_splits, out_splits


def _check_counts(name: str, counts: tuple[int, ...], group: Group) -> None:
    if len(counts) != group.size or any(count < 0 for count in counts):
        raise PhalanxDistError(
            f"{name}={counts} must hold one number, 0 or more, for each of the {group.size} ranks "
            f"of {group.name}"
        )
