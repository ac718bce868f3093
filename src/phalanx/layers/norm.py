"""RMS norm: a weight and an epsilon over the fused operators."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx.device.operators.base import Operators


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension (Zhang and Sennrich, 2019)."""

    def __init__(
        self,
        width: int,
        eps: float,
        operators: Operators,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(width, dtype=dtype, device=device), requires_grad=False
        )
        self.eps = eps
        self._operators = operators

    def forward(self, x: Tensor) -> Tensor:
        return self._operators.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of `residual + x`, and that sum; `residual` may be overwritten with it."""
        return self._operators.add_rms_norm(x, residual, self.weight, self.eps)
