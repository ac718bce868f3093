"""The transformer on its own: plain attention instead of the step's resources, and what it is fed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from phalanx.device.operators import create_operators
from phalanx.device.operators.base import HeadLayout, Operators
from phalanx.models.cosmos3.checkpoint import load_weights, read_config
from phalanx.models.cosmos3.geometry import MediaShape, media_positions
from phalanx.models.cosmos3.media import MediaRow, Velocity
from phalanx.models.cosmos3.transformer import Cosmos3Transformer
from phalanx.parallel.ranks import Ranks
from tests.models.cosmos3.stored import checkpoint, tensors

TOLERANCE = 2e-5
CPU = torch.device("cpu")
Rotary = tuple[Tensor, Tensor]


def repeated(x: Tensor, times: int) -> Tensor:
    """Key-value heads [T, KV, D] as often as queries share them."""
    return x.repeat_interleave(times, dim=1)


def soft_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, widen=repeated) -> Tensor:
    """Attention written out: [T, H D] of `q` [T, H, D] to the keys of one sequence."""
    keys, values = (widen(one, q.shape[1] // k.shape[1]) for one in (k, v))
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

    widen = staticmethod(repeated)

    def write(self, qkv: Tensor, heads: HeadLayout, rotary: Rotary) -> Tensor:
        k, v = qkv.new_zeros(2, 1, len(qkv), heads.num_kv_heads, heads.head_dim)
        slots = torch.arange(len(qkv))
        q = self.operators.rope_and_write(qkv, heads, rotary, (k, v), slots)
        self.layers.append((k[0], v[0]))
        return q

    def attend(self, qkv: Tensor, heads: HeadLayout, rotary: Rotary) -> Tensor:
        q = self.write(qkv, heads, rotary)
        return soft_attention(q, *self.layers[-1], causal=self.causal, widen=self.widen)


class CausalText:
    """What `RaggedAttention` does with one text."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return soft_attention(q, k, v, causal=True)


class JoinedText:
    """What `JointAttention` does for one segment: its own tokens and all of a text, no mask."""

    causal = False
    widen = staticmethod(repeated)

    def __init__(self, text: TextMemory) -> None:
        self._layers: Iterator[tuple[Tensor, Tensor]] = iter(text.layers)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.joined(next(self._layers), (k, v))
        return soft_attention(q, keys, values, causal=self.causal, widen=self.widen)

    def joined(self, text: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor]) -> Iterator[Tensor]:
        return (torch.cat(pair) for pair in zip(text, own, strict=True))


@dataclass
class Forward:
    """One pass of text and media; a mistake changes a part of it."""

    transformer: Cosmos3Transformer
    ids: Tensor
    row: MediaRow
    positions: Tensor
    memory: TextMemory
    attention: type[JoinedText] = JoinedText
    embedded: MediaRow | None = None
    """What is embedded, where that is not the row."""

    @classmethod
    def of(
        cls,
        transformer: Cosmos3Transformer,
        ids: Tensor,
        row: MediaRow,
        operators: Operators | None = None,
    ) -> Forward:
        positions = media_positions(transformer.config, row.shape, len(ids))
        operators = operators or create_operators("off", "cpu", transformer.dtype)
        return cls(transformer, ids, row, positions, TextMemory(operators))

    def read(self) -> None:
        within = CausalText() if self.transformer.config.separate_text_keys else None
        self.transformer.read(self.ids, torch.arange(len(self.ids)), self.memory, within)

    def run(self) -> Velocity:
        transformer = self.transformer
        self.read()
        tokens = transformer.embed_media([self.embedded or self.row])
        hidden = transformer.velocity_hidden(
            tokens, transformer.rotary(self.positions), self.attention(self.memory)
        )
        return transformer.velocities(hidden, [self.row])[0]


def loaded(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    ranks: Ranks | None = None,
    operators: Operators | None = None,
) -> Cosmos3Transformer:
    """The transformer of a checkpoint's directory, alone unless `ranks` are given."""
    operators = operators or create_operators("off", "cpu", dtype)
    ranks = ranks or Ranks.alone(CPU)
    transformer = Cosmos3Transformer(read_config(directory), operators, dtype, ranks)
    load_weights(transformer, directory, CPU)
    return transformer


def with_config(directory: Path, family: str = "silu", **changes: object) -> Path:
    """A checkpoint of the family whose configuration says something else."""
    path = checkpoint(directory, family) / "transformer" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return directory


def known_ids(family: str = "silu") -> Tensor:
    return tensors(f"{family}/io")["in.input_ids"]


def known_row(family: str = "silu") -> MediaRow:
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
    vision, sound, actions = (
        given[f"in.{kind}_tokens.0"] for kind in ("vision", "sound", "action")
    )
    return MediaRow(shape, 637, vision[0], sound, actions, domain=8)


def errors(velocity: Velocity, family: str = "silu") -> dict[str, float]:
    """The largest error of each modality of the stored forward."""
    known = tensors(f"{family}/io")
    got = {"vision": velocity.vision[None], "sound": velocity.sound, "action": velocity.actions}
    return {
        name: (x.float() - known[f"out.{name}"]).abs().max().item()
        for name, x in got.items()
        if x is not None
    }
