"""What a mesh asks of a backend: collectives and point-to-point calls over one group.

Ranks are positions in the group. Tensors are contiguous and on a device of type `device_type`;
every rank of the group makes the same calls in the same order. A call that fails raises
`PhalanxDistError`, after which the group cannot be used any more.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from torch import Tensor


class ReduceOp(StrEnum):
    """How values of several ranks become one."""

    SUM = "sum"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"


class Collectives(Protocol):
    """Calls that all ranks of the group take part in."""

    @property
    def device_type(self) -> str: ...

    def all_reduce_(self, x: Tensor, op: ReduceOp) -> None:
        """Put the reduction of every rank's `x` into `x`."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's `x`, all of one shape, stacked: [ranks, *shape]."""
        ...

    def reduce_scatter(self, x: Tensor, op: ReduceOp) -> Tensor:
        """Of the reduction of every rank's `x` [ranks * n, ...], the n rows of this rank."""
        ...

    def all_to_all(
        self, x: Tensor, in_splits: tuple[int, ...], out_splits: tuple[int, ...]
    ) -> Tensor:
        """Send `in_splits[r]` rows of `x` to each rank r, receive `out_splits[r]` from it."""
        ...

    def broadcast_(self, x: Tensor, src: int) -> None:
        """Put the `x` of rank `src` into every `x`."""
        ...


class PointToPoint(Protocol):
    """Calls between two ranks of the group, and waiting for all."""

    def send(self, x: Tensor, dst: int) -> None:
        """Send `x` to rank `dst`."""
        ...

    def recv_(self, x: Tensor, src: int) -> None:
        """Receive into `x` what rank `src` sends."""
        ...

    def barrier(self) -> None:
        """Return when every rank of the group has called this."""
        ...


class GroupCollectives(Collectives, PointToPoint, Protocol):
    """Everything that one group can do."""
