"""What model code calls to communicate inside its replica, by the name of a group.

Each call returns a new tensor, except `all_reduce_`; in a group of one that is a copy, and nothing
else is done. `src` and `dst` are positions in the group. Every rank of a group makes the same calls
in the same order. `mesh` is a mesh or its name; by default the current one. A wrong call raises
`PhalanxDistError` before anything is sent, as far as one rank can tell.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.errors import PhalanxDistError
from phalanx.parallel.arguments import (
    check_other_rank,
    check_rank,
    check_reduction,
    check_sizes,
    check_tensor,
    dimension,
    splits,
)
from phalanx.parallel.collectives.base import ReduceOp
from phalanx.parallel.current import find_group
from phalanx.parallel.mesh import Group, Mesh


def all_reduce(
    x: Tensor, group: Group | str, op: ReduceOp = ReduceOp.SUM, *, mesh: Mesh | str | None = None
) -> Tensor:
    """The reduction of every rank's `x`, the same on all; any shape."""
    return all_reduce_(_copy(x), find_group(group, mesh), op)


def all_reduce_(
    x: Tensor, group: Group | str, op: ReduceOp = ReduceOp.SUM, *, mesh: Mesh | str | None = None
) -> Tensor:
    """Replace `x`, which must be contiguous, by the reduction of every rank's; returns `x`.

    Does nothing in a group of one.
    """
    found = find_group(group, mesh)
    collectives = found.collectives
    if collectives is not None:
        check_tensor("all_reduce", x, collectives)
        check_reduction("all_reduce", x, op)
        if not x.is_contiguous():
            raise PhalanxDistError("all_reduce_ needs a contiguous tensor; use all_reduce")
        collectives.all_reduce_(x, op)
    return x


def all_gather(
    x: Tensor,
    group: Group | str,
    dim: int = -1,
    *,
    sizes: Sequence[int] | None = None,
    mesh: Mesh | str | None = None,
) -> Tensor:
    """Every rank's `x` one after another along `dim`, in the order of the group.

    `sizes` holds each rank's extent along `dim`; it is needed where they differ.
    """
    found = find_group(group, mesh)
    dim = dimension("all_gather", x, dim)
    if sizes is not None:
        check_sizes(x, dim, tuple(sizes), found)
    if found.collectives is None:
        return _copy(x)
    check_tensor("all_gather", x, found.collectives)
    if sizes is None or len(set(sizes)) == 1:
        gathered = found.collectives.all_gather(x.contiguous())
        return gathered.flatten(0, 1) if dim == 0 else torch.cat(gathered.unbind(0), dim)
    # Backends gather equal shapes only, so all are filled up to the largest.
    filled = x.new_empty(*x.shape[:dim], max(sizes), *x.shape[dim + 1 :])
    filled.narrow(dim, 0, x.shape[dim]).copy_(x)
    gathered = found.collectives.all_gather(filled)
    parts = [part.narrow(dim, 0, size) for part, size in zip(gathered, sizes, strict=True)]
    return torch.cat(parts, dim)


def reduce_scatter(
    x: Tensor,
    group: Group | str,
    dim: int = 0,
    op: ReduceOp = ReduceOp.SUM,
    *,
    mesh: Mesh | str | None = None,
) -> Tensor:
    """This rank's part along `dim` of the reduction of every rank's `x`.

    The extent of `dim` must be a multiple of the group's size.
    """
    found = find_group(group, mesh)
    dim = dimension("reduce_scatter", x, dim)
    if x.shape[dim] % found.size:
        raise PhalanxDistError(
            f"reduce_scatter cannot divide dimension {dim} of {tuple(x.shape)} among the "
            f"{found.size} ranks of {found.name}; pad it to a multiple of {found.size}"
        )
    if found.collectives is None:
        return _copy(x)
    check_tensor("reduce_scatter", x, found.collectives)
    check_reduction("reduce_scatter", x, op)
    part = found.collectives.reduce_scatter(x.movedim(dim, 0).contiguous(), op)
    return part.movedim(0, dim).contiguous()


def all_to_all(
    x: Tensor,
    group: Group | str,
    in_splits: Sequence[int] | None = None,
    out_splits: Sequence[int] | None = None,
    *,
    mesh: Mesh | str | None = None,
) -> Tensor:
    """Rows of `x` exchanged: `in_splits[r]` of them go to rank r, `out_splits[r]` come from it.

    Without splits every rank gives and gets the same number of rows.
    """
    found = find_group(group, mesh)
    dimension("all_to_all", x, 0)
    sent, received = splits(
        x.shape[0],
        None if in_splits is None else tuple(in_splits),
        None if out_splits is None else tuple(out_splits),
        found,
    )
    if found.collectives is None:
        return _copy(x)
    check_tensor("all_to_all", x, found.collectives)
    return found.collectives.all_to_all(x.contiguous(), sent, received)


def broadcast(
    x: Tensor, group: Group | str, src: int = 0, *, mesh: Mesh | str | None = None
) -> Tensor:
    """The `x` of rank `src`; the others give a tensor of the same shape and dtype."""
    found = find_group(group, mesh)
    check_rank("src", src, found)
    out = _copy(x)
    if found.collectives is not None:
        check_tensor("broadcast", x, found.collectives)
        found.collectives.broadcast_(out, src)
    return out


def send(x: Tensor, group: Group | str, dst: int, *, mesh: Mesh | str | None = None) -> None:
    """Send `x` to rank `dst`, which calls `recv` with its shape and dtype."""
    found = find_group(group, mesh)
    check_rank("dst", dst, found)
    if found.collectives is None:
        return
    check_tensor("send", x, found.collectives)
    check_other_rank("dst", dst, found)
    found.collectives.send(x.contiguous(), dst)


def recv(
    shape: Sequence[int],
    dtype: torch.dtype,
    group: Group | str,
    src: int,
    device: torch.device | str | None = None,
    *,
    mesh: Mesh | str | None = None,
) -> Tensor:
    """What rank `src` sends: a tensor of this shape and dtype, on `device` (by default the rank's).

    In a group of one: zeros.
    """
    found = find_group(group, mesh)
    check_rank("src", src, found)
    if device is None:
        device = found.device
    if found.collectives is None:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    check_other_rank("src", src, found)
    out = torch.empty(tuple(shape), dtype=dtype, device=device)
    check_tensor("recv", out, found.collectives)
    found.collectives.recv_(out, src)
    return out


def barrier(group: Group | str = "world", *, mesh: Mesh | str | None = None) -> None:
    """Return when every rank of the group has called this."""
    found = find_group(group, mesh)
    if found.collectives is not None:
        found.collectives.barrier()


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)
