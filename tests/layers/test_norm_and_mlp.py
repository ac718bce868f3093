"""The norm and the gated block over the operators."""

from __future__ import annotations

import torch
from torch import nn

from phalanx.device.operators import create_operators
from phalanx.layers.linear import Linear
from phalanx.layers.mlp import GatedMLP
from phalanx.layers.norm import RMSNorm

OPERATORS = create_operators("off", "cpu", torch.float32)


def test_norm_and_its_sum():
    norm = RMSNorm(16, 1e-5, OPERATORS)
    nn.init.uniform_(norm.weight)
    x, residual = torch.randn(3, 16), torch.randn(3, 16)
    expected = nn.functional.rms_norm(x + residual, (16,), norm.weight, 1e-5)
    total = x + residual
    normed, summed = norm.add(x, residual.clone())
    torch.testing.assert_close(normed, expected)
    torch.testing.assert_close(summed, total)
    torch.testing.assert_close(norm(total), expected)


def test_gate_comes_first():
    gate_up, down = Linear(8, 24), Linear(12, 8)
    mlp = GatedMLP(gate_up, down, OPERATORS)
    nn.init.normal_(gate_up.weight)
    nn.init.normal_(down.weight)
    x = torch.randn(4, 8)
    gate, up = (x @ gate_up.weight.t()).split(12, dim=1)
    expected = (nn.functional.silu(gate) * up) @ down.weight.t()
    torch.testing.assert_close(mlp(x), expected)
