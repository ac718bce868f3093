"""The operators in C++, vectorised for this CPU and built on first use.

float32 and bfloat16 are stored as they are and computed in float32.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from phalanx.device.operators.base import HeadLayout, PagedPlan
from phalanx.device.operators.native_build import load_native_module
from phalanx.device.operators.torch_operators import TorchOperators

DTYPES = (torch.float32, torch.bfloat16)
LANES = 16


class NativeOperators:
    """`Operators` on a CPU. Head sizes that are no multiple of 16 take the torch path."""

    def __init__(self) -> None:
        self._module: ModuleType = load_native_module()
        self._torch = TorchOperators()

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
