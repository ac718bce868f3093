"""The decoder: embeddings, layers of attention and gated feed-forward, norm and head.

Over several ranks each holds some of the heads, of the feed-forward's inner width and of the
vocabulary. Hidden states and logits are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from phalanx.device.operators.base import HeadLayout, Operators
from phalanx.layers.linear import Linear, meta_linear
from phalanx.layers.mlp import GatedMLP
from phalanx.layers.norm import RMSNorm
from phalanx.layers.rotary import RotaryEmbedding
from phalanx.layers.token_embedding import TokenEmbedding
from phalanx.layers.weight_slots import Cut
from phalanx.models.causal_lm.config import DecoderConfig
from phalanx.parallel.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from phalanx.parallel.local import LocalEmbedding, LocalLinear
from phalanx.parallel.ranks import Ranks
from phalanx.parallel.vocabulary import VocabParallelEmbedding, VocabParallelHead
from phalanx.step.resources.attention import PagedAttention

Hidden = tuple[Tensor, Tensor]
"""The newest sublayer's output and the residual that it has yet to be added to, [T, width]."""


def _called(layer: RowParallelLinear | VocabParallelHead) -> LocalLinear:
    """What to call for a layer: itself, or by one rank alone directly what holds the weight."""
    return layer.local if layer.group.size == 1 else layer


class DecoderLayer(nn.Module):
    """One pre-norm layer. Queries, keys and values are one projection, gate and up another.

    `cuts` tells by name which part of each projection this rank holds.
    """

    qkv: LocalLinear
    output: LocalLinear

    def __init__(
        self, config: DecoderConfig, operators: Operators, dtype: torch.dtype, ranks: Ranks
    ) -> None:
        super().__init__()
        width, inner, local = config.width, config.inner_width, meta_linear(dtype)
        qkv = QKVParallelLinear(
            width,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            group=ranks.attention,
            bias=config.qkv_bias,
            local=local,
        )
        output = RowParallelLinear(
            config.q_rows,
            width,
            group=ranks.attention,
            columns=qkv.query_columns,
            bias=config.output_bias,
            local=local,
        )
        gate_up = MergedColumnParallelLinear(width, (inner, inner), group=ranks.dense, local=local)
        down = RowParallelLinear(inner, width, group=ranks.dense, local=local)
        self.input_norm = RMSNorm(width, config.norm_eps, operators, dtype=dtype, device="meta")
        # The projections that widen do not communicate: their whole work is their local layer's.
        self.qkv = qkv.local
        self.output = _called(output)
        self.post_norm = RMSNorm(width, config.norm_eps, operators, dtype=dtype, device="meta")
        self.mlp = GatedMLP(gate_up.local, _called(down), operators)
        self.q_norm: nn.Parameter | None = None
        self.k_norm: nn.Parameter | None = None
        if config.qk_norm:
            self.q_norm = nn.Parameter(torch.empty(config.head_dim, dtype=dtype, device="meta"))
            self.k_norm = nn.Parameter(torch.empty(config.head_dim, dtype=dtype, device="meta"))
        self.head_shard = qkv.heads
        self.cuts = {
            "qkv": Cut.of(qkv),
            "output": Cut.of(output),
            "gate_up": Cut.of(gate_up),
            "down": Cut.of(down),
        }
        self._config = config

    def heads(self) -> HeadLayout:
        """How the fused projection splits; built anew, since weights may have been exchanged."""
        return HeadLayout(
            self.head_shard.num_heads,
            self.head_shard.num_kv_heads,
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

    embedding: LocalEmbedding
    head: LocalLinear

    def __init__(
        self,
        config: DecoderConfig,
        operators: Operators,
        dtype: torch.dtype,
        max_positions: int,
        ranks: Ranks,
    ) -> None:
        """Parameters are made on the meta device; the loader gives them storage."""
        super().__init__()
        self.config = config
        self.ranks = ranks

        def table(num_embeddings: int, width: int) -> TokenEmbedding:
            return TokenEmbedding(num_embeddings, width, dtype)

        embedding = VocabParallelEmbedding(
            config.vocab_size, config.width, group=ranks.dense, local=table
        )
        head = VocabParallelHead(
            config.width, config.vocab_size, group=ranks.dense, local=meta_linear(dtype)
        )
        self.embedding = embedding.local if ranks.size == 1 else embedding
        self.layers = nn.ModuleList(
            DecoderLayer(config, operators, dtype, ranks) for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(config.width, config.norm_eps, operators, dtype=dtype, device="meta")
        self.head = _called(head)
        self.cuts = {"embedding": Cut.of(embedding), "head": Cut.of(head)}
        self.rotary = RotaryEmbedding(config.head_dim, max_positions, config.rope)

    def blocks(self) -> Iterator[DecoderLayer]:
        """The layers, in order."""
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads of this rank."""
        return next(self.blocks()).head_shard.num_kv_heads

    def tie_head(self) -> None:
        """Let the head use the embedding's weight."""
        embedding, head = self.cuts["embedding"].local, self.cuts["head"].local
        assert isinstance(embedding, TokenEmbedding)
        assert isinstance(head, Linear)
        head.tie(embedding.weight)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: PagedAttention) -> Hidden:
        """`token_ids` and `positions` are int64 [T]."""
        rotary = self.rotary(positions)
        x = self.embedding.forward(token_ids)
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
