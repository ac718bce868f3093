"""Recurrent and convolution state: blocks of fixed size a layer for every (request, label).

A convolution's window is one more block beside a recurrence's state: only the shapes differ. A
captured or padded row works on the sink, slot 0, and holds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from phalanx.errors import ConfigurationError
from phalanx.step.resources.base import BuildInfo, ResourceSpec
from phalanx.step.resources.slot_plan import SlotRows
from phalanx.step.resources.slot_storage import Contents, SlotStorage, StateBlock
from phalanx.step.resources.slotted_state import SlottedState, StateStep

__all__ = ["LayerState", "RecurrentState", "RecurrentStateSpec", "StateBlock", "StateStep"]


@dataclass(frozen=True)
class RecurrentStateSpec(ResourceSpec):
    """Declares state of `num_layers` layers, each with these blocks, for `max_slots` streams.

    `num_host_slots` is the room on the host for state that makes way for others'.
    """

    blocks: Mapping[str, StateBlock]
    num_layers: int
    max_slots: int
    num_host_slots: int = 0

    def __post_init__(self) -> None:
        if not self.blocks or self.num_layers < 1 or self.max_slots < 1:
            raise ConfigurationError(
                f"recurrent state {self.key!r} has {len(self.blocks)} blocks, "
                f"{self.num_layers} layers and {self.max_slots} slots; each must be at least 1"
            )

    def build(self, info: BuildInfo) -> RecurrentState:
        storage = SlotStorage(self.blocks, self.max_slots, self.num_layers, info.backend)
        return RecurrentState(self.key, storage, self.max_slots, self.num_host_slots, info.backend)


class RecurrentState(SlottedState):
    """See the module. The label cursor and the layer cursor are reset when a step begins, so that a
    stack of layers passes neither.
    """

    _layer = 0

    def select(self, label: str) -> None:
        """Go on with the rows of `label`, from the first layer."""
        super().select(label)
        self._layer = 0

    def next_layer(self) -> LayerState:
        """The state of the running step's rows in one layer; each call moves to the next."""
        tensors = {name: whole[self._layer] for name, whole in self._storage.tensors.items()}
        self._layer += 1
        return LayerState(tensors, self.rows)


@dataclass(frozen=True)
class LayerState:
    """One layer's blocks for the rows of a step.

    Kernels that work in place take `tensors`, `[max_slots + 1, *block]` by name, and `rows.slots`.
    """

    tensors: Contents
    rows: SlotRows

    def read(self, name: str) -> Tensor:
        """A copy of the rows' blocks, `[rows, *block]`; zeros for a row that has no state yet."""
        return self.tensors[name].index_select(0, self.rows.slots)

    def write(self, name: str, values: Tensor) -> None:
        """Replace the rows' blocks."""
        self.tensors[name].index_copy_(0, self.rows.slots, values)
