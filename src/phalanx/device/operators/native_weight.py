"""Weights packed for the native linear kernels, in memory that the system may back by huge pages."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from phalanx.device.operators.int8_weight import quantize_channels

PANEL_CHANNELS = 48
CHUNK_BYTES = 16 << 20
_ALIGNMENT = 64


class _Block:
    """Memory that pieces are cut from, one after another."""

    def __init__(self, num_bytes: int, module: ModuleType) -> None:
        # Room to align to a huge page, which also aligns what is cut to a cache line.
        self._bytes = torch.empty(num_bytes + _ALIGNMENT, dtype=torch.uint8)
        module.advise_huge_pages(self._bytes)
        self._used = -self._bytes.data_ptr() % _ALIGNMENT

    def cut(self, num_bytes: int) -> Tensor | None:
        """None where so much is not left."""
        if self._used + num_bytes > self._bytes.numel():
            return None
        taken = self._bytes[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return taken


@dataclass(frozen=True)
class Piece:
    """Some bytes of a block, which lives as long as one of its pieces."""

    bytes: Tensor
    block: _Block


class HugePageArena:
    """Hands out bytes from large blocks; it keeps none itself, so that all of them can be freed."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._newest: weakref.ref[_Block] | None = None

    def take(self, num_bytes: int) -> Piece:
        """`num_bytes` uninitialized bytes, aligned to a cache line."""
        block = None if self._newest is None else self._newest()
        taken = None if block is None else block.cut(num_bytes)
        if block is None or taken is None:
            block = _Block(max(CHUNK_BYTES, num_bytes), self._module)
            self._newest = weakref.ref(block)
            taken = block.cut(num_bytes)
            assert taken is not None
        return Piece(taken, block)


class NativeWeight:
    """A `PackedWeight` of float32 or bfloat16; `dense()` is exact."""

    def __init__(self, module: ModuleType, arena: HugePageArena, weight: Tensor) -> None:
        self._module = module
        self._shape, self._dtype = weight.shape, weight.dtype
        self._piece = _pack(module, arena, weight)
        self._packed = self._piece.bytes

    @property
    def num_bytes(self) -> int:
        return self._packed.numel()

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = self._module.linear(x.contiguous(), self._packed, bias, self._shape[0])
        return out

    def dense(self) -> Tensor:
        weight = torch.empty(self._shape, dtype=self._dtype)
        self._module.unpack_linear(self._packed, weight)
        return weight


class NativeInt8Weight:
    """A `PackedWeight` of 8 bits; `dense()` is the nearest weight that they can hold."""

    def __init__(self, module: ModuleType, arena: HugePageArena, weight: Tensor) -> None:
        rounded, self._scales = quantize_channels(weight)
        self._sums = rounded.sum(dim=1, dtype=torch.int32)
        self._module = module
        self._shape, self._dtype = weight.shape, weight.dtype
        self._piece = _pack(module, arena, rounded)
        self._packed = self._piece.bytes

    @property
    def num_bytes(self) -> int:
        return self._packed.numel() + 8 * self._shape[0]

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = self._module.linear_int8(
            x.contiguous(), self._packed, self._scales, self._sums, bias
        )
        return out

    def dense(self) -> Tensor:
        rounded = torch.empty(self._shape, dtype=torch.int8)
        self._module.unpack_linear(self._packed, rounded)
        return (rounded.float() * self._scales[:, None]).to(self._dtype)


def fits(weight: Tensor, element_bytes: int) -> bool:
    """Whether rows of `weight`, stored in `element_bytes` each, divide into groups of 4 bytes."""
    return weight.device.type == "cpu" and weight.shape[1] * element_bytes % 4 == 0


def _pack(module: ModuleType, arena: HugePageArena, weight: Tensor) -> Piece:
    channels = -(-weight.shape[0] // PANEL_CHANNELS) * PANEL_CHANNELS
    piece = arena.take(channels * weight.shape[1] * weight.element_size())
    module.pack_linear(weight.contiguous(), piece.bytes)
    return piece
