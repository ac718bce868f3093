"""The critic of a pi0.5 that is trained: how much return is expected, of what its expert knows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from phalanx.layers.linear import Linear
from phalanx.models.pi.targets import Named, whole_linear


class ValueHead(nn.Module):
    """`out(silu(in(x)))` in float32. A new one says 0 of everything."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = max(width // 2, 1)
        self.enter = Linear(width, inner, bias=True, dtype=torch.float32)
        self.leave = Linear(inner, 1, bias=True, dtype=torch.float32)
        self.draw()

    def draw(self) -> None:
        """Make it a new one; always the same."""
        generator = torch.Generator().manual_seed(0)
        inner, width = self.enter.weight.shape
        drawn = torch.randn((inner, width), generator=generator, device="cpu") / width**0.5
        with torch.no_grad():
            self.enter.weight.copy_(drawn)
            for parameter in (self.enter.bias, self.leave.weight, self.leave.bias):
                assert parameter is not None
                parameter.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """[R, width] as [R, 1]."""
        return self.leave.forward(functional.silu(self.enter.forward(x)))

    def targets(self) -> Named:
        yield from whole_linear("value_head.in_proj", self.enter)
        yield from whole_linear("value_head.out_proj", self.leave)
