"""The transformer: text through layers of its own, whose keys and values stay, and media through
layers of theirs, as often as a solver asks for a velocity.

Over several ranks each holds some of every layer; tokens and hidden values are whole on every rank.
Embeddings and heads are on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from phalanx.device.operators.base import Operators
from phalanx.layers.interleaved_rotary import InterleavedRotary, Rotary
from phalanx.layers.linear import Linear
from phalanx.layers.token_embedding import TokenEmbedding
from phalanx.models.cosmos3.config import Cosmos3Config
from phalanx.models.cosmos3.layer import (
    Hidden,
    LastTextLayer,
    LayerParts,
    MediaLayer,
    ReadAttention,
    TextLayer,
    TokenAttention,
)
from phalanx.models.cosmos3.media import MediaRow, MediaTokens, Velocity
from phalanx.parallel.ranks import Ranks


class Cosmos3Transformer(nn.Module):
    """See the module. Parameters are made on the meta device; the loader gives them storage."""

    def __init__(
        self, config: Cosmos3Config, operators: Operators, dtype: torch.dtype, ranks: Ranks
    ) -> None:
        """Raises `ConfigurationError` where the ranks are more than the model divides by."""
        super().__init__()
        config.check_tensor_parallel(ranks.size)
        self.config = config
        self.ranks = ranks
        self.dtype = dtype
        parts = LayerParts(config, operators, dtype, ranks)
        self.embedding = TokenEmbedding(config.vocab_size, config.hidden_size, dtype)
        self.text_layers = nn.ModuleList(
            TextLayer(parts) for _ in range(config.num_hidden_layers - 1)
        )
        self.last_text_layer = LastTextLayer(parts)
        self.media = MediaTokens(config, dtype)
        self.media_layers = nn.ModuleList(
            MediaLayer(parts) for _ in range(config.num_hidden_layers)
        )
        self.media_norm = parts.norm()
        self.rotary = InterleavedRotary(config.head_dim, config.rope_theta, config.rope_axes_dim)
        self._operators = operators

    def text_blocks(self) -> Iterator[TextLayer]:
        """The layers of text but the last, in order."""
        for layer in self.text_layers:
            assert isinstance(layer, TextLayer)
            yield layer

    def media_blocks(self) -> Iterator[MediaLayer]:
        """The layers of media, in order."""
        for layer in self.media_layers:
            assert isinstance(layer, MediaLayer)
            yield layer

    @property
    def num_heads(self) -> int:
        """Query heads of this rank."""
        return next(self.media_blocks()).head_shard.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads of this rank."""
        return next(self.media_blocks()).head_shard.num_kv_heads

    def read(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: ReadAttention,
        within: TokenAttention | None = None,
    ) -> None:
        """Leave the keys and values of text in the cache of `attention`, of every layer.

        `token_ids` and `positions` are int64 [T], positions from 0 in every text. `within` attends
        within the texts alone, causally; only a model with `separate_text_keys` needs it.
        """
        rotary = self.rotary.line(positions)
        x = self.embedding.forward(token_ids)
        hidden: Hidden = (torch.zeros_like(x), x)
        for layer in self.text_blocks():
            hidden = layer.forward(hidden, rotary, attention, within)
        self.last_text_layer.forward(hidden, rotary, attention)

    def embed_media(self, rows: Sequence[MediaRow]) -> Tensor:
        """Tokens [N, width] of the rows' media, one row after another."""
        return self.media.embed(rows)

    def velocity_hidden(self, tokens: Tensor, rotary: Rotary, attention: TokenAttention) -> Tensor:
        """The normed last hidden values [N, width] of `tokens`, which may be overwritten.

        `rotary` is what `self.rotary` makes of the tokens' positions.
        """
        hidden: Hidden = (torch.zeros_like(tokens), tokens)
        for layer in self.media_blocks():
            hidden = layer.forward(hidden, rotary, attention)
        return self.media_norm.add(*hidden)[0]

    def velocities(self, hidden: Tensor, rows: Sequence[MediaRow]) -> list[Velocity]:
        """What `velocity_hidden` says of each row's latents; zero where nothing is drawn."""
        return self.media.velocities(hidden, rows)

    def checksum(self) -> int:
        """A number of weights that every rank has whole: norms, and what is added to media.

        They are a small part of the model, and no two trained ones have the same.
        """
        total = 0
        for name, weight in self.named_parameters():
            if weight.dim() == 1 and ("norm" in name or name.startswith("media.")):
                bits = weight.detach().float().view(torch.int32)
                total += int(bits.sum(dtype=torch.int64))
        return total

    def pack_matrix(self, linear: Linear) -> None:
        """Give a layer whose weight is whole its fastest form."""
        self.media.time.forget()
        linear.pack(operators=self._operators)
