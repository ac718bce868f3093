"""The operators in C++, vectorised for this CPU and built on first use.

float32 and bfloat16 are stored as they are and computed in float32.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from phalanx.device.operators.base import HeadLayout, PackedWeight, PagedPlan
from phalanx.device.operators.native_build import load_native_module
from phalanx.device.operators.native_weight import (
    HugePageArena,
    NativeInt8Weight,
    NativeWeight,
    fits,
)
from phalanx.device.operators.torch_operators import TorchOperators

DTYPES = (torch.float32, torch.bfloat16)
LANES = 16


class NativeOperators:
    """`Operators` on a CPU.

    Head sizes that are no multiple of 16 take the torch path, and so do linear layers on a CPU
    without dot-product instructions for their dtype.
    """

    def __init__(self) -> None:
        self._module: ModuleType = load_native_module()
        self._torch = TorchOperators()
        self._arena = HugePageArena(self._module)
        self._linear_kinds = frozenset(self._module.linear_kinds())

    @property
    def capturable(self) -> bool:
        return False

    @property
    def name(self) -> str:
        return "native"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out: Tensor = self._module.rms_norm(x.contiguous(), weight, eps)
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = residual.contiguous()
        out: Tensor = self._module.add_rms_norm(x.contiguous(), total, weight, eps)
        return out, total

    def rope_and_write(
        self,
        qkv: Tensor,
        heads: HeadLayout,
        rotary: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        slots: Tensor,
    ) -> Tensor:
        q: Tensor = self._module.rope_and_write(
            qkv.contiguous(),
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            (heads.q_norm, heads.k_norm),
            heads.eps,
            rotary,
            cache,
            slots,
        )
        return q

    def paged_attention(
        self, q: Tensor, cache: tuple[Tensor, Tensor], plan: PagedPlan, scale: float
    ) -> Tensor:
        if q.shape[2] % LANES:
            return self._torch.paged_attention(q, cache, plan, scale)
        out: Tensor = self._module.paged_attention(
            q.contiguous(),
            cache,
            plan.query_starts,
            plan.page_table,
            plan.kv_lens,
            plan.num_single,
            plan.causal,
            scale,
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        out: Tensor = self._module.silu_mul(gate_up.contiguous())
        return out

    def pack_weight(self, weight: Tensor, quantization: str | None) -> PackedWeight | None:
        kind = quantization or str(weight.dtype).removeprefix("torch.")
        element_bytes = 1 if quantization == "int8" else weight.element_size()
        if kind not in self._linear_kinds or not fits(weight, element_bytes):
            return self._torch.pack_weight(weight, quantization)
        if quantization == "int8":
            return NativeInt8Weight(self._module, self._arena, weight)
        return NativeWeight(self._module, self._arena, weight)
