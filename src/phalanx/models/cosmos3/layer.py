"""The layers of both streams, each with weights of its own: text reads itself, causally, and leaves
keys and values behind; media read those and themselves.

Keys and values that a stream leaves are rotated already. Over several ranks each holds some of the
heads and of the feed-forward's inner width; hidden states are whole on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from phalanx.device.operators.base import HeadLayout, Operators
from phalanx.layers.interleaved_rotary import Rotary
from phalanx.layers.linear import meta_linear
from phalanx.layers.norm import RMSNorm
from phalanx.layers.weight_slots import Cut
from phalanx.models.cosmos3.config import Cosmos3Config
from phalanx.models.cosmos3.feed_forward import FeedForward
from phalanx.parallel.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from phalanx.parallel.local import LocalLinear
from phalanx.parallel.ranks import Ranks

Hidden = tuple[Tensor, Tensor]
"""The newest sublayer's output and the residual that it has yet to be added to, [T, width]."""


class ReadAttention(Protocol):
    """Causal attention over a cache, such as `PagedAttention`; a call goes on to the next layer."""

    def attend(self, qkv: Tensor, heads: HeadLayout, rotary: Rotary) -> Tensor: ...

    def write(self, qkv: Tensor, heads: HeadLayout, rotary: Rotary) -> Tensor: ...


class TokenAttention(Protocol):
    """Attention of rotated queries [T, H, D] to rotated keys and values [T, KV, D]: [T, H D].

    Of media (`JointAttention`) every token sees all of its own segment and the text's cached keys, a
    call goes on to the next layer; of text (`RaggedAttention`) it sees those before it.
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class LayerParts:
    """What all layers are made of."""

    config: Cosmos3Config
    operators: Operators
    dtype: torch.dtype
    ranks: Ranks

    def norm(self) -> RMSNorm:
        config = self.config
        return RMSNorm(
            config.hidden_size,
            config.rms_norm_eps,
            self.operators,
            dtype=self.dtype,
            device="meta",
        )

    def head_norm(self) -> nn.Parameter:
        weight = torch.empty(self.config.head_dim, dtype=self.dtype, device="meta")
        return nn.Parameter(weight, requires_grad=False)


class StreamLayer(nn.Module):
    """What the layers of both streams have: norms, projections and a feed-forward.

    `cuts` tells by name which part of each projection this rank holds.
    """

    qkv: LocalLinear
    output: LocalLinear

    def __init__(self, parts: LayerParts, *, qk_norm: bool) -> None:
        super().__init__()
        config, ranks, local = parts.config, parts.ranks, meta_linear(parts.dtype)
        qkv = QKVParallelLinear(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            group=ranks.attention,
            bias=config.attention_bias,
            local=local,
        )
        output = RowParallelLinear(
            config.q_rows,
            config.hidden_size,
            group=ranks.attention,
            columns=qkv.query_columns,
            bias=config.attention_bias,
            local=local,
        )
        self.input_norm = parts.norm()
        self.qkv = qkv.local
        self.output = output
        self.post_norm = parts.norm()
        self.mlp = FeedForward(config, parts.operators, parts.dtype, ranks)
        self.q_norm = parts.head_norm() if qk_norm else None
        self.k_norm = parts.head_norm() if qk_norm else None
        self.head_shard = qkv.heads
        self.cuts = {"qkv": Cut.of(qkv), "output": Cut.of(output), **self.mlp.cuts}
        self.config = config
        self.operators = parts.operators

    def heads(self) -> HeadLayout:
        """How the fused projection splits; built anew, since weights are assigned."""
        return self._heads(self.q_norm, self.k_norm)

    def _heads(self, q_norm: Tensor | None, k_norm: Tensor | None) -> HeadLayout:
        shard, config = self.head_shard, self.config
        return HeadLayout(
            shard.num_heads,
            shard.num_kv_heads,
            config.head_dim,
            q_norm,
            k_norm,
            config.rms_norm_eps,
        )

    def rotated(self, qkv: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, H, D], keys and values [T, KV, D] of a fused projection, normed and rotated."""
        heads, tokens = self.heads(), qkv.shape[0]
        # A cache of one page that is as long as the step takes the keys and values.
        k, v = qkv.new_empty(2, 1, tokens, heads.num_kv_heads, heads.head_dim)
        slots = torch.arange(tokens, device=qkv.device)
        q = self.operators.rope_and_write(qkv, heads, rotary, (k, v), slots)
        return q, k[0], v[0]

    def finished(self, attended: Tensor, residual: Tensor) -> Hidden:
        """The rest of the layer behind its attention."""
        x, residual = self.post_norm.add(self.output.forward(attended), residual)
        return self.mlp.forward(x), residual


class TextLayer(StreamLayer):
    """A layer of text. `media_k_norm` norms the keys that media read, where those are others."""

    def __init__(self, parts: LayerParts) -> None:
        super().__init__(parts, qk_norm=parts.config.qk_norm_for_text)
        self.media_k_norm = parts.head_norm() if parts.config.separate_text_keys else None

    def forward(
        self,
        hidden: Hidden,
        rotary: Rotary,
        attention: ReadAttention,
        within: TokenAttention | None,
    ) -> Hidden:
        x, residual = self.input_norm.add(*hidden)
        qkv = self.qkv.forward(x)
        if self.media_k_norm is None:
            attended = attention.attend(qkv, self.heads(), rotary)
        else:
            assert within is not None, "text that reads other keys than media do needs `within`"
            attention.write(qkv, self._heads(self.q_norm, self.media_k_norm), rotary)
            attended = within.attend(*self.rotated(qkv, rotary))
        return self.finished(attended, residual)


class LastTextLayer(nn.Module):
    """The last layer of text, whose output nobody reads: it leaves keys and values, no more."""

    kv: LocalLinear

    def __init__(self, parts: LayerParts) -> None:
        super().__init__()
        config = parts.config
        kv = MergedColumnParallelLinear(
            config.hidden_size,
            (config.kv_rows, config.kv_rows),
            group=parts.ranks.attention,
            bias=config.attention_bias,
            local=meta_linear(parts.dtype),
        )
        self.input_norm = parts.norm()
        self.kv = kv.local
        normed = config.qk_norm_for_text or config.separate_text_keys
        self.k_norm = parts.head_norm() if normed else None
        self.cuts = {"kv": Cut.of(kv)}
        self._num_kv_heads = kv.local_sizes[0] // config.head_dim
        self._config = config

    def forward(self, hidden: Hidden, rotary: Rotary, attention: ReadAttention) -> None:
        x, _ = self.input_norm.add(*hidden)
        config = self._config
        heads = HeadLayout(
            0, self._num_kv_heads, config.head_dim, None, self.k_norm, config.rms_norm_eps
        )
        attention.write(self.kv.forward(x), heads, rotary)


class MediaLayer(StreamLayer):
    """A layer of media."""

    def __init__(self, parts: LayerParts) -> None:
        super().__init__(parts, qk_norm=True)

    def forward(self, hidden: Hidden, rotary: Rotary, attention: TokenAttention) -> Hidden:
        x, residual = self.input_norm.add(*hidden)
        attended = attention.attend(*self.rotated(self.qkv.forward(x), rotary))
        return self.finished(attended, residual)
