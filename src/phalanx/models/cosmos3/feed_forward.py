"""The feed-forward of a layer: gated by SiLU, or of squared ReLUs (Primer, So et al. 2021).

Many tokens go through it in blocks, whose results the ranks add up all at once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from phalanx.device.operators.base import Operators
from phalanx.layers.linear import meta_linear
from phalanx.layers.token_blocks import token_blocks
from phalanx.layers.weight_slots import Cut
from phalanx.models.cosmos3.config import Cosmos3Config
from phalanx.parallel.linear import MergedColumnParallelLinear, RowParallelLinear
from phalanx.parallel.local import LocalLinear
from phalanx.parallel.ranks import Ranks


class FeedForward(nn.Module):
    """`down(silu(gate x) * up(x))`, or `down(relu(up x)^2)`; gate and up are one projection."""

    widen: LocalLinear

    def __init__(
        self, config: Cosmos3Config, operators: Operators, dtype: torch.dtype, ranks: Ranks
    ) -> None:
        super().__init__()
        width, inner, local = config.hidden_size, config.intermediate_size, meta_linear(dtype)
        self.gated = config.hidden_act == "silu"
        parts = (inner, inner) if self.gated else (inner,)
        widen = MergedColumnParallelLinear(width, parts, group=ranks.dense, local=local)
        self.widen = widen.local
        self.down = RowParallelLinear(inner, width, group=ranks.dense, local=local)
        self.cuts = {"widen": Cut.of(widen), "down": Cut.of(self.down)}
        self._inner_values = sum(widen.local_sizes)
        self._operators = operators

    def forward(self, x: Tensor) -> Tensor:
        """`x` [T, width]."""
        blocks = [self._alone(block) for block in token_blocks(x, self._inner_values)]
        return self.down.add_up(blocks[0] if len(blocks) == 1 else torch.cat(blocks))

    def _alone(self, x: Tensor) -> Tensor:
        """What this rank gives to the sum."""
        widened = self.widen.forward(x)
        if self.gated:
            return self.down.local.forward(self._operators.silu_mul(widened))
        return self.down.local.forward(functional.relu(widened).square_())
