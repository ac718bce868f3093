"""The decoder: embeddings, layers of attention and gated feed-forward, norm and head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from phalanx.device.operators.base import HeadLayout, Operators
from phalanx.layers.linear import Linear
from phalanx.layers.mlp import GatedMLP
from phalanx.layers.norm import RMSNorm
from phalanx.layers.rotary import RotaryEmbedding
from phalanx.models.causal_lm.config import DecoderConfig
from phalanx.step.resources.attention import PagedAttention

Hidden = tuple[Tensor, Tensor]
"""The newest sublayer's output and the residual that it has yet to be added to, [T, width]."""


class TokenEmbedding(nn.Module):
    """Rows of `weight` [vocabulary, width], made on the meta device.

    torch's own embedding fills itself at random, which on `meta` imports torch's compiler: seconds.
    """

    def __init__(self, vocab_size: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        weight = torch.empty(vocab_size, width, dtype=dtype, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """`token_ids` int64 [T]."""
        return functional.embedding(token_ids, self.weight)


class DecoderLayer(nn.Module):
    """One pre-norm layer. Queries, keys and values are one projection."""

    def __init__(self, config: DecoderConfig, operators: Operators, dtype: torch.dtype) -> None:
        super().__init__()
        width, device = config.width, "meta"
        self.input_norm = RMSNorm(width, config.norm_eps, operators, dtype=dtype, device=device)
        self.qkv = Linear(
            width,
            config.q_rows + 2 * config.kv_rows,
            bias=config.qkv_bias,
            dtype=dtype,
            device=device,
        )
        self.output = Linear(
            config.q_rows, width, bias=config.output_bias, dtype=dtype, device=device
        )
        self.post_norm = RMSNorm(width, config.norm_eps, operators, dtype=dtype, device=device)
        self.mlp = GatedMLP(width, config.inner_width, operators, dtype=dtype, device=device)
        self.q_norm: nn.Parameter | None = None
        self.k_norm: nn.Parameter | None = None
        if config.qk_norm:
            self.q_norm = nn.Parameter(torch.empty(config.head_dim, dtype=dtype, device=device))
            self.k_norm = nn.Parameter(torch.empty(config.head_dim, dtype=dtype, device=device))
        self._config = config

    def heads(self) -> HeadLayout:
        """How the fused projection splits; built anew, since weights may have been exchanged."""
        return HeadLayout(
            self._config.num_heads,
            self._config.num_kv_heads,
            self._config.head_dim,
            self.q_norm,
            self.k_norm,
            self._config.norm_eps,
        )

    def forward(
        self, hidden: Hidden, rotary: tuple[Tensor, Tensor], attention: PagedAttention
    ) -> Hidden:
        # `forward` without the hooks that a module's call looks for: these are the hottest calls.
        x, residual = self.input_norm.add(*hidden)
        attended = attention.attend(self.qkv.forward(x), self.heads(), rotary)
        x, residual = self.post_norm.add(self.output.forward(attended), residual)
        return self.mlp.forward(x), residual


class Decoder(nn.Module):
    """Token ids to hidden states, and hidden states to logits."""

    def __init__(
        self, config: DecoderConfig, operators: Operators, dtype: torch.dtype, max_positions: int
    ) -> None:
        """Parameters are made on the meta device; the loader gives them storage."""
        super().__init__()
        self.config = config
        self.embedding = TokenEmbedding(config.vocab_size, config.width, dtype)
        self.layers = nn.ModuleList(
            DecoderLayer(config, operators, dtype) for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(config.width, config.norm_eps, operators, dtype=dtype, device="meta")
        self.head = Linear(config.width, config.vocab_size, dtype=dtype, device="meta")
        self.rotary = RotaryEmbedding(config.head_dim, max_positions, config.rope)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: PagedAttention) -> Hidden:
        """`token_ids` and `positions` are int64 [T]."""
        rotary = self.rotary(positions)
        x = self.embedding(token_ids)
        hidden: Hidden = (torch.zeros_like(x), x)
        for layer in self.layers:
            hidden = layer(hidden, rotary, attention)
        return hidden

    def logits(self, hidden: Hidden, rows: Tensor | None) -> Tensor:
        """Logits [len(rows), vocabulary] of the given token rows, int64; None for all."""
        x, residual = hidden
        if rows is not None:
            x, residual = x.index_select(0, rows), residual.index_select(0, rows)
        else:
            residual = residual.clone()  # the norm overwrites it
        return self.head.forward(self.norm.add(x, residual)[0])

    def pack(self, operators: Operators, quantization: str | None) -> int:
        """Give every linear layer its fastest form, one after another; returns their bytes."""
        total = 0
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack(quantization, operators=operators)
                total += module.packed_bytes
        return total
