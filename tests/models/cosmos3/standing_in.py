"""The transformer on its own: plain attention instead of the step's resources, and what it is fed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx.device.operators import create_operators
from phalanx.device.operators.base import HeadLayout, Operators
from phalanx.models.cosmos3.config import Cosmos3Config
from phalanx.models.cosmos3.geometry import MediaShape, media_positions
from phalanx.models.cosmos3.loading import load_transformer
from phalanx.models.cosmos3.media import MediaRow, Velocity
from phalanx.models.cosmos3.transformer import Cosmos3Transformer
from phalanx.parallel.ranks import Ranks
from tests.models.cosmos3.stored import tensors

CPU = torch.device("cpu")


def soft_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Attention written out: [T, H D] of `q` [T, H, D] to the keys of one sequence."""
    share = q.shape[1] // k.shape[1]
    keys, values = (one.repeat_interleave(share, dim=1) for one in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, keys) / math.sqrt(q.shape[2])
    if causal:
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(k) - len(q) + 1)
        scores = scores.masked_fill(later, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1)


@dataclass
class TextMemory:
    """A cache of one text: what `PagedAttention` does, layer by layer."""

    operators: Operators
    causal: bool = True
    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def write(self, qkv: Tensor, heads: HeadLayout, rotary: tuple[Tensor, Tensor]) -> Tensor:
        k, v = qkv.new_zeros(2, 1, len(qkv), heads.num_kv_heads, heads.head_dim)
        slots = torch.arange(len(qkv))
        q = self.operators.rope_and_write(qkv, heads, rotary, (k, v), slots)
        self.layers.append((k[0], v[0]))
        return q

    def attend(self, qkv: Tensor, heads: HeadLayout, rotary: tuple[Tensor, Tensor]) -> Tensor:
        q = self.write(qkv, heads, rotary)
        return soft_attention(q, *self.layers[-1], causal=self.causal)


class CausalText:
    """What `RaggedAttention` does with one text."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return soft_attention(q, k, v, causal=True)


@dataclass
class JoinedText:
    """What `JointAttention` does for one segment: its own tokens and all of a text, no mask."""

    text: TextMemory
    causal: bool = False
    layer: int = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.text.layers[self.layer]
        self.layer += 1
        joined = torch.cat((keys, k)), torch.cat((values, v))
        return soft_attention(q, *joined, causal=self.causal)


def loaded(
    directory, dtype: torch.dtype = torch.float32, ranks: Ranks | None = None, native: str = "auto"
) -> Cosmos3Transformer:
    """The transformer of a checkpoint's directory, alone unless `ranks` are given."""
    operators = create_operators(native, "cpu", dtype)
    return load_transformer(directory, operators, CPU, dtype, ranks or Ranks.alone(CPU))


def known_row(family: str) -> MediaRow:
    """What the stored forward of a family was fed, besides its text."""
    given = tensors(f"{family}/io")
    shape = MediaShape(
        (3, 3, 4),
        fps=10.0,
        sound_frames=5,
        action_rows=8,
        clean_frames=frozenset({0}),
        clean_rows=frozenset({2}),
    )
    return MediaRow(
        shape,
        637,
        given["in.vision_tokens.0"][0],
        given["in.sound_tokens.0"],
        given["in.action_tokens.0"],
        domain=8,
    )


def remembered(transformer: Cosmos3Transformer, ids: Tensor) -> TextMemory:
    """A text, read."""
    memory = TextMemory(transformer._operators)
    within = CausalText() if transformer.config.separate_text_keys else None
    transformer.read(ids, torch.arange(len(ids)), memory, within)
    return memory


def velocity_of(
    transformer: Cosmos3Transformer,
    ids: Tensor,
    row: MediaRow,
    positions: Tensor | None = None,
) -> Velocity:
    """One forward of text and media."""
    memory = remembered(transformer, ids)
    if positions is None:
        positions = media_positions(transformer.config, row.shape, len(ids))
    rotary = transformer.rotary(positions)
    hidden = transformer.velocity_hidden(
        transformer.embed_media([row]), rotary, JoinedText(memory)
    )
    return transformer.velocities(hidden, [row])[0]
