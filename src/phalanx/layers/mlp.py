"""The gated feed-forward block of Llama-like models, with gate and up projection fused."""

from __future__ import annotations

from torch import Tensor, nn

from phalanx.device.operators.base import Operators
from phalanx.parallel.local import LocalLinear


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, where `gate_up` gives [T, 2 inner], gate first.

    Both are linear layers, whole or cut over the same ranks.
    """

    gate_up: LocalLinear
    down: LocalLinear

    def __init__(self, gate_up: LocalLinear, down: LocalLinear, operators: Operators) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self._operators = operators

    def forward(self, x: Tensor) -> Tensor:
        # A module's own call costs more than a small kernel and adds nothing here: no hooks exist.
        return self.down.forward(self._operators.silu_mul(self.gate_up.forward(x)))
