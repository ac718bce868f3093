"""The memory behind state of fixed size: named tensors with one block a slot. Slot 0 is the sink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.device.base import DeviceBackend

SINK_SLOT = 0

Contents = Mapping[str, Tensor]
"""What some slots hold: by name, with as many slots as were asked for."""


@dataclass(frozen=True)
class StateBlock:
    """What one slot holds of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


class SlotStorage:
    """Tensors `[layers, max_slots + 1, *block]`, or `[max_slots + 1, *block]` without layers."""

    def __init__(
        self,
        blocks: Mapping[str, StateBlock],
        max_slots: int,
        num_layers: int | None,
        backend: DeviceBackend,
    ) -> None:
        self._blocks = dict(blocks)
        self._lead = (max_slots + 1,) if num_layers is None else (num_layers, max_slots + 1)
        self._axis = len(self._lead) - 1
        self._backend = backend
        self._tensors = self._allocated()

    @property
    def released(self) -> bool:
        return not self._tensors

    @property
    def tensors(self) -> Contents:
        """The whole tensors by name."""
        return self._tensors

    def zero(self, slots: Sequence[int]) -> None:
        if slots and not self.released:
            index = self._index(slots)
            for tensor in self._tensors.values():
                tensor.index_fill_(self._axis, index, 0)

    def copy(self, source: int, target: int) -> None:
        """Make `target` hold what `source` holds."""
        for tensor in self._tensors.values():
            tensor.select(self._axis, target).copy_(tensor.select(self._axis, source))

    def read(self, slots: Sequence[int]) -> Contents:
        """A copy of what these slots hold."""
        index = self._index(slots)
        return {name: one.index_select(self._axis, index) for name, one in self._tensors.items()}

    def write(self, slots: Sequence[int], contents: Contents) -> None:
        """Put back what `read` returned."""
        index = self._index(slots)
        for name, values in contents.items():
            self._tensors[name].index_copy_(self._axis, index, values)

    def release(self) -> None:
        """Let go of the memory."""
        self._tensors = {}

    def restore(self) -> None:
        """Take the memory again, empty."""
        self._tensors = self._allocated()

    def _index(self, slots: Sequence[int]) -> Tensor:
        return torch.tensor(slots, dtype=torch.int64, device=self._backend.device)

    def _allocated(self) -> dict[str, Tensor]:
        return {
            name: self._backend.zeros((*self._lead, *block.shape), block.dtype)
            for name, block in self._blocks.items()
        }
