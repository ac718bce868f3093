"""Collectives by `torch.distributed`; what both of its backends do in the same way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.errors import PhalanxDistError
from phalanx.parallel.collectives.base import ReduceOp
from phalanx.parallel.process_group import first_line

_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
}


class TorchCollectives:
    """The calls over one process group whose ranks, in the whole replica, are `members`.

    The list forms of gather and scatter are used: both backends have them, in every release.
    """

    def __init__(self, process_group: dist.ProcessGroup, members: tuple[int, ...]) -> None:
        self._group = process_group
        self._members = members

    def all_reduce_(self, x: Tensor, op: ReduceOp) -> None:
        with self._failing("all_reduce"):
            dist.all_reduce(x, op=_OPS[op], group=self._group)

    def all_gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(len(self._members), *x.shape)
        with self._failing("all_gather"):
            dist.all_gather(list(out.unbind(0)), x, group=self._group)
        return out

    def reduce_scatter(self, x: Tensor, op: ReduceOp) -> Tensor:
        parts = list(x.chunk(len(self._members)))
        out = torch.empty_like(parts[0])
        with self._failing("reduce_scatter"):
            dist.reduce_scatter(out, parts, op=_OPS[op], group=self._group)
        return out

    def all_to_all(
        self, x: Tensor, in_splits: tuple[int, ...], out_splits: tuple[int, ...]
    ) -> Tensor:
        out = x.new_empty(sum(out_splits), *x.shape[1:])
        with self._failing("all_to_all"):
            dist.all_to_all_single(out, x, list(out_splits), list(in_splits), group=self._group)
        return out

    def broadcast_(self, x: Tensor, src: int) -> None:
        with self._failing("broadcast"):
            dist.broadcast(x, group=self._group, group_src=src)

    def send(self, x: Tensor, dst: int) -> None:
        with self._failing("send"):
            dist.send(x, group=self._group, group_dst=dst)

    def recv_(self, x: Tensor, src: int) -> None:
        with self._failing("recv"):
            dist.recv(x, group=self._group, group_src=src)

    @contextmanager
    def _failing(self, op: str) -> Iterator[None]:
        """Report what torch raises as an error of ours that names the call and its ranks."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise PhalanxDistError(
                f"{op} over ranks {', '.join(map(str, self._members))} failed: "
                f"{first_line(error)}; a rank has ended, or the ranks did not make the same calls "
                "with the same shapes in the same order"
            ) from error
