"""Places of a model that the tensors of a checkpoint go to, over one rank or several.

A parameter may take several tensors, such as the three projections that it fuses, and over several
ranks each holds some of the whole's rows or columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from phalanx.layers.linear import Linear, shell_of
from phalanx.parallel.sharding import Span, WeightShard


class _CutLayer(Protocol):
    """A layer of `parallel`: this rank's part of the whole weight, and the module that holds it."""

    @property
    def shard(self) -> WeightShard: ...

    @property
    def local(self) -> object: ...


@dataclass(frozen=True)
class Cut:
    """The module that holds this rank's part of a weight, and which part of the whole it is."""

    local: nn.Module
    shard: WeightShard

    @classmethod
    def of(cls, layer: _CutLayer) -> Cut:
        assert isinstance(layer.local, nn.Module)
        return cls(layer.local, layer.shard)


@dataclass(frozen=True, eq=False)
class Slot:
    """A parameter of this rank's model, and the part that it holds of a whole of `shape`.

    That part is the spans of `rows`, one below the other, each of `columns` (None for a vector).
    Without rows the rank has no such parameter.
    """

    owner: nn.Module
    attribute: str
    shape: tuple[int, ...]
    rows: tuple[Span, ...]
    columns: Span | None = None

    @property
    def linear(self) -> Linear | None:
        """The layer whose matrix this is, which may be packed."""
        owner = self.owner
        return owner if isinstance(owner, Linear) and self.attribute == "weight" else None

    @property
    def is_here(self) -> bool:
        """Whether this rank holds some of it."""
        return bool(self.rows)

    def value(self) -> Tensor:
        """What this rank holds, as a plain tensor; of a packed matrix a copy."""
        linear = self.linear
        if linear is not None:
            return linear.dense_weight()
        return self.owner.get_parameter(self.attribute).detach()

    def drop(self) -> None:
        """Give the memory up; the parameter is an empty shell on `meta` then."""
        if not self.is_here:
            return
        linear = self.linear
        if linear is not None:
            linear.drop_weight()
        else:
            parameter = self.owner.get_parameter(self.attribute)
            self._assign(shell_of(parameter))

    def own(self) -> None:
        """Have the parameter in memory of its own."""
        parameter = self.owner.get_parameter(self.attribute)
        if not parameter.is_meta:
            self._assign(parameter.detach().clone())

    def fill(self, start: int, part: Tensor, device: torch.device) -> bool:
        """Put `part` into the parameter from its row `start` on; True where it is now `part` itself,
        which is all of it.
        """
        parameter = self.owner.get_parameter(self.attribute)
        fits = part.shape == parameter.shape and part.dtype == parameter.dtype
        on_cpu = device.type == "cpu" and part.device.type == "cpu"
        if fits and on_cpu and part.is_contiguous():
            self._assign(part)
            return True
        if parameter.is_meta:
            parameter = self._assign(shell_of(parameter, device))
        parameter.data[start : start + part.shape[0]].copy_(part)
        return False

    def _assign(self, tensor: Tensor) -> nn.Parameter:
        parameter = nn.Parameter(tensor, requires_grad=False)
        self.owner.register_parameter(self.attribute, parameter)
        return parameter


@dataclass(frozen=True)
class Target:
    """Rows `start` to `start + rows` of the whole that a slot holds a part of."""

    slot: Slot
    start: int
    rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, *self.slot.shape[1:])

    def place(self, tensor: Tensor, device: torch.device) -> bool:
        """Put what this rank holds of `tensor` into its slot; True where that refers to it now."""
        columns = self.slot.columns
        lent = False
        for start, span in self.held():
            part = tensor[span.slice]
            lent |= self.slot.fill(
                start, part if columns is None else part[:, columns.slice], device
            )
        return lent

    def held(self) -> Iterator[tuple[int, Span]]:
        """The parts of the tensor that this rank holds, each with its first row in the slot."""
        at = 0
        for span in self.slot.rows:
            first = max(span.start, self.start)
            stop = min(span.stop, self.start + self.rows)
            if first < stop:
                yield at + first - span.start, Span(first, stop).shifted(-self.start)
            at += span.size


def replicated(owner: nn.Module, attribute: str) -> Target:
    """A parameter that every rank has whole, in one tensor of its shape."""
    shape = tuple(owner.get_parameter(attribute).shape)
    return whole(Slot(owner, attribute, shape, (Span(0, shape[0]),)))


def whole(slot: Slot) -> Target:
    """A tensor that is all of the whole that a slot holds a part of."""
    return Target(slot, 0, slot.shape[0])


def weight_slot(cut: Cut, shape: tuple[int, int]) -> Slot:
    """The matrix of a cut layer, whole of `shape`."""
    return Slot(cut.local, "weight", shape, _joined(cut.shard.rows), cut.shard.columns)


def bias_slot(cut: Cut, rows: int) -> Slot:
    """The bias of a cut layer, whole of `rows`."""
    held = _joined(cut.shard.rows) if cut.shard.holds_bias else ()
    return Slot(cut.local, "bias", (rows,), held)


def vector_slot(owner: nn.Module, attribute: str, rows: int) -> Slot:
    """A vector that every rank has whole."""
    return Slot(owner, attribute, (rows,), (Span(0, rows),))


def _joined(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """The same rows in as few spans as possible, so that a part that lies whole is found whole."""
    joined: list[Span] = []
    for span in spans:
        if joined and joined[-1].stop == span.start:
            span = Span(joined.pop().start, span.stop)
        joined.append(span)
    return tuple(joined)
