"""The gated feed-forward block of Llama-like models, with gate and up projection fused."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx.device.operators.base import Operators
from phalanx.layers.linear import Linear


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`; `gate_up` is [2 inner, width], gate first."""

    def __init__(
        self,
        width: int,
        inner: int,
        operators: Operators,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.gate_up = Linear(width, 2 * inner, dtype=dtype, device=device)
        self.down = Linear(inner, width, dtype=dtype, device=device)
        self._operators = operators

    def forward(self, x: Tensor) -> Tensor:
        # A module's own call costs more than a small kernel and adds nothing here: no hooks exist.
        return self.down.forward(self._operators.silu_mul(self.gate_up.forward(x)))
