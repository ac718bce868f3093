"""A weight in oneDNN's blocked layout, which a CPU reads at twice the speed of the plain matrix."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


class OneDnnWeight:
    """A `PackedWeight` of float32 or bfloat16; `dense()` is exact."""

    def __init__(self, weight: Tensor) -> None:
        self._blocked = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._num_bytes = weight.numel() * weight.element_size()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._blocked, bias, "none", [], "")
        return out

    def dense(self) -> Tensor:
        dense: Tensor = self._blocked.to_dense()
        return dense


@cache
def onednn_packs(dtype: torch.dtype) -> bool:
    """Whether this build of torch and this CPU can pack weights of `dtype`; tried once on a small one.

    float16 has no fast kernel on most CPUs and stays plain.
    """
    if dtype not in (torch.float32, torch.bfloat16) or not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    weight = torch.eye(32, dtype=dtype)
    try:
        packed = OneDnnWeight(weight)
        return torch.equal(packed.apply(weight, None), weight) and torch.equal(
            packed.dense(), weight
        )
    except (AttributeError, RuntimeError):
        return False
