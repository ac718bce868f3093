"""Gemma decoder layers: norms that scale by `1 + w`, or are modulated by a condition, rotary
positions, grouped attention over a paged cache, and a feed-forward gated by tanh-GELU.

Norms compute in float32 whatever the parameters' dtype. Formulas: RMS norm, Zhang and Sennrich
2019; adaptive norm with scale, shift and gate, Peebles and Xie 2022 (DiT).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from phalanx.device.operators.base import HeadLayout, Operators
from phalanx.layers.linear import Linear
from phalanx.layers.rotary import RopeParameters, inverse_frequencies
from phalanx.layers.token_blocks import token_blocks
from phalanx.step.resources.attention import PagedAttention

Rotary = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class GemmaShape:
    """Sizes of a stack of layers."""

    width: int
    inner_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float = 1e-6

    @property
    def heads(self) -> HeadLayout:
        return HeadLayout(self.num_heads, self.num_kv_heads, self.head_dim)

    @property
    def q_rows(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.num_kv_heads * self.head_dim


class GemmaRotary(nn.Module):
    """Tables of cosines and sines by position, float32 [max_positions, head_dim / 2].

    A model that is cast to `dtype` rounds the frequencies to it, and both tables: so do these.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        with torch.device("cpu"):
            frequencies = inverse_frequencies(head_dim, RopeParameters()).to(dtype).float()
            angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
        self.register_buffer("cos", angles.cos().to(dtype).float(), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype).float(), persistent=False)

    def forward(self, positions: Tensor) -> Rotary:
        """(cos, sin) of `positions` [T]."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


class GemmaNorm(nn.Module):
    """RMS norm times `1 + weight`; the result has the dtype of `x`."""

    def __init__(self, width: int, eps: float, operators: Operators) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)
        self._eps = eps
        self._operators = operators

    def forward(self, x: Tensor) -> Tensor:
        normed = self._operators.rms_norm(x.float(), 1.0 + self.weight, self._eps)
        return normed.to(x.dtype)


@dataclass(frozen=True)
class Modulation:
    """What a condition makes of one norm: float32 factors, to be added and gates, each
    [rows, 1, width], or [rows, tokens, width] where tokens differ.
    """

    factor: Tensor
    shift: Tensor
    gate: Tensor


class AdaptiveNorm(nn.Module):
    """RMS norm without weights, then `normed * (1 + scale) + shift` by a condition."""

    def __init__(self, width: int, eps: float, operators: Operators) -> None:
        super().__init__()
        self.dense = Linear(width, 3 * width, bias=True, dtype=torch.float32)
        self.register_buffer("ones", torch.ones(width), persistent=False)
        self.ones: Tensor
        self._eps = eps
        self._operators = operators

    def modulation(self, condition: Tensor) -> Tensor:
        """Factor, shift and gate, [..., 3 width], of a condition [..., width]."""
        scale, shift, gate = self.dense(condition).chunk(3, dim=-1)
        return torch.cat((1.0 + scale, shift, gate), dim=-1)

    def forward(self, x: Tensor, by: Modulation) -> Tensor:
        """`x` [rows * tokens, width], normed and modulated, in its dtype."""
        normed = self._operators.rms_norm(x.float(), self.ones, self._eps)
        by_row = normed.view(by.factor.shape[0], -1, normed.shape[-1])
        return torch.addcmul(by.shift, by_row, by.factor).view_as(x).to(x.dtype)


class GemmaMLP(nn.Module):
    """`down(gelu(gate(x)) * up(x))`; `gate_up` gives both, gate first."""

    def __init__(self, shape: GemmaShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = Linear(shape.width, 2 * shape.inner_width, dtype=dtype)
        self.down = Linear(shape.inner_width, shape.width, dtype=dtype)
        self.inner_values = 2 * shape.inner_width
        """Numbers that a token takes inside."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up.forward(x).chunk(2, dim=-1)
        return self.down.forward(functional.gelu(gate, approximate="tanh").mul_(up))


class GemmaAttention(nn.Module):
    """Self-attention over a paged cache, with queries, keys and values in one projection."""

    def __init__(self, shape: GemmaShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.qkv = Linear(shape.width, shape.q_rows + 2 * shape.kv_rows, dtype=dtype)
        self.out = Linear(shape.q_rows, shape.width, dtype=dtype)
        self._heads = shape.heads

    def forward(self, x: Tensor, attention: PagedAttention, rotary: Rotary) -> Tensor:
        return self.out.forward(attention.attend(self.qkv.forward(x), self._heads, rotary))

    def remember(self, x: Tensor, attention: PagedAttention, rotary: Rotary) -> None:
        """Leave keys and values in the cache, no more."""
        attention.write(self.qkv.forward(x), self._heads, rotary)


class GemmaLayer(nn.Module):
    """One layer with plain norms."""

    def __init__(self, shape: GemmaShape, dtype: torch.dtype, operators: Operators) -> None:
        super().__init__()
        self.input_norm = GemmaNorm(shape.width, shape.eps, operators)
        self.attention = GemmaAttention(shape, dtype)
        self.post_norm = GemmaNorm(shape.width, shape.eps, operators)
        self.mlp = GemmaMLP(shape, dtype)

    def forward(self, x: Tensor, attention: PagedAttention, rotary: Rotary) -> Tensor:
        x = x + self.attention.forward(self.input_norm.forward(x), attention, rotary)
        for block in token_blocks(x, self.mlp.inner_values):
            block.add_(self.mlp.forward(self.post_norm.forward(block)))
        return x

    def remember(self, x: Tensor, attention: PagedAttention, rotary: Rotary) -> None:
        """What the last layer does whose output nobody reads."""
        self.attention.remember(self.input_norm.forward(x), attention, rotary)


class CachingLayer(nn.Module):
    """A last layer whose output nobody reads: it leaves keys and values in the cache, no more."""

    def __init__(self, shape: GemmaShape, dtype: torch.dtype, operators: Operators) -> None:
        super().__init__()
        self.input_norm = GemmaNorm(shape.width, shape.eps, operators)
        self.kv = Linear(shape.width, 2 * shape.kv_rows, dtype=dtype)
        self._heads = HeadLayout(0, shape.num_kv_heads, shape.head_dim)

    def remember(self, x: Tensor, attention: PagedAttention, rotary: Rotary) -> None:
        attention.write(self.kv.forward(self.input_norm.forward(x)), self._heads, rotary)


class AdaptiveGemmaLayer(nn.Module):
    """One layer whose norms and residuals follow a condition."""

    def __init__(self, shape: GemmaShape, dtype: torch.dtype, operators: Operators) -> None:
        super().__init__()
        self.input_norm = AdaptiveNorm(shape.width, shape.eps, operators)
        self.attention = GemmaAttention(shape, dtype)
        self.post_norm = AdaptiveNorm(shape.width, shape.eps, operators)
        self.mlp = GemmaMLP(shape, dtype)

    def forward(
        self,
        x: Tensor,
        by: tuple[Modulation, Modulation],
        attention: PagedAttention,
        rotary: Rotary,
    ) -> Tensor:
        attended = self.attention.forward(self.input_norm.forward(x, by[0]), attention, rotary)
        x = gated_sum(x, attended, by[0])
        return gated_sum(x, self.mlp.forward(self.post_norm.forward(x, by[1])), by[1])


def gated_sum(x: Tensor, y: Tensor, by: Modulation) -> Tensor:
    """`x + y * gate`, both [rows * tokens, width], in the dtype of `x`."""
    shape = (by.gate.shape[0], -1, x.shape[-1])
    return torch.addcmul(x.view(shape), y.view(shape), by.gate.to(x.dtype)).view_as(x)
