"""The tolerance is narrow enough: each mistake that a port of one forward can make exceeds it.

A mistake is made by other weights or inputs, or by a part of a test's own. The errors next to each
are known, so that the mistake is the one that is meant.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from phalanx.device.operators.base import HeadLayout
from phalanx.device.operators.torch_operators import TorchOperators
from phalanx.layers.linear import Linear
from phalanx.models.cosmos3.transformer import Cosmos3Transformer
from tests.models.cosmos3.mistakes import Mistake, check, forward, worst
from tests.models.cosmos3.standing_in import (
    TOLERANCE,
    Forward,
    JoinedText,
    TextMemory,
)
from tests.models.cosmos3.stored import tensors


@pytest.mark.parametrize("family", ["silu", "relu2"])
def test_without_a_mistake_the_error_is_far_below_the_tolerance(folders, family):
    assert max(worst(forward(folders[family], family), family)) < TOLERANCE / 4


class OwnOperators(TorchOperators):
    """What is done to queries and keys, in steps that can be mistaken."""

    def rope_and_write(self, qkv, heads: HeadLayout, rotary, cache, slots) -> Tensor:
        q_heads, kv_heads = heads.num_heads, heads.num_kv_heads
        split = qkv.view(len(qkv), q_heads + 2 * kv_heads, heads.head_dim)
        q, k, v = split.split([q_heads, kv_heads, kv_heads], dim=1)
        cache[0].flatten(0, 1)[slots] = self.prepared(k, heads.k_norm, heads.eps, rotary)
        cache[1].flatten(0, 1)[slots] = v
        return self.prepared(q, heads.q_norm, heads.eps, rotary).contiguous()

    def prepared(self, x: Tensor, norm: Tensor | None, eps: float, rotary) -> Tensor:
        return self.rotated(self.normed(x, norm, eps), rotary)

    def normed(self, x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
        return x if norm is None else functional.rms_norm(x, (x.shape[-1],), norm, eps)

    def rotated(self, x: Tensor, rotary) -> Tensor:
        cos, sin = (one[:, None] for one in rotary)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class PairwiseRotation(OwnOperators):
    """Neighbours turn, by the angles that halves would have."""

    def rotated(self, x: Tensor, rotary) -> Tensor:
        cos, sin = (torch.cat((one, one), dim=-1)[:, None] for one in rotary)
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        return x * cos + turned * sin


class NormBehindRotation(OwnOperators):
    def prepared(self, x: Tensor, norm: Tensor | None, eps: float, rotary) -> Tensor:
        return self.normed(self.rotated(x, rotary), norm, eps)


def pairwise(run: Forward) -> None:
    use_operators(run, PairwiseRotation())


def media_normed_behind_rotation(run: Forward) -> None:
    for layer in run.transformer.media_blocks():
        layer.operators = NormBehindRotation()


def use_operators(run: Forward, operators: OwnOperators) -> None:
    run.memory.operators = operators
    for layer in (*run.transformer.text_blocks(), *run.transformer.media_blocks()):
        layer.operators = operators


OPERATED = [
    Mistake("adjacent pairs rotated", pairwise, (1.08, 0.62, 0.69)),
    Mistake("normed behind the rotation", media_normed_behind_rotation, (0.86, 0.27, 0.34)),
]


@pytest.mark.parametrize("mistake", OPERATED, ids=str)
def test_a_mistake_in_what_is_done_to_queries_and_keys(folders, mistake):
    run = forward(folders["silu"])
    mistake.make(run)
    check(worst(run), mistake.errors)


def test_the_operators_of_these_tests_are_right(folders):
    run = forward(folders["silu"])
    use_operators(run, OwnOperators())
    assert max(worst(run)) < TOLERANCE / 4


def tiled(x: Tensor, times: int) -> Tensor:
    return x.repeat(1, times, 1)


class TiledText(TextMemory):
    widen = staticmethod(tiled)


class TextNormedAsMedia(TextMemory):
    """What media read of the text has been normed as their own keys are."""

    def attend(self, qkv, heads: HeadLayout, rotary) -> Tensor:
        attended = super().attend(qkv, heads, rotary)
        self.layers.pop()
        self.write(qkv, replace(heads, k_norm=self.norms[len(self.layers)]), rotary)
        return attended


class TiledJoint(JoinedText):
    widen = staticmethod(tiled)


class CausalJoint(JoinedText):
    causal = True


class Alone(JoinedText):
    def joined(self, text, own):
        return own


def tiled_heads(run: Forward) -> None:
    run.memory, run.attention = TiledText(run.memory.operators), TiledJoint


def text_normed_as_media(run: Forward) -> None:
    run.memory = TextNormedAsMedia(run.memory.operators)
    run.memory.norms = [layer.k_norm for layer in run.transformer.media_blocks()]
    run.transformer.last_text_layer.k_norm = run.memory.norms[-1]


def text_sees_ahead(run: Forward) -> None:
    run.memory.causal = False


def causal_media(run: Forward) -> None:
    run.attention = CausalJoint


def media_without_text(run: Forward) -> None:
    run.attention = Alone


def timed_clean_tokens(run: Forward) -> None:
    drawn = replace(run.row.shape, clean_frames=frozenset(), clean_rows=frozenset())
    run.embedded = replace(run.row, shape=drawn)


def replicated_padding(run: Forward) -> None:
    vision = functional.pad(run.row.vision, (0, 0, 0, 1), mode="replicate")
    run.embedded = replace(run.row, vision=vision)


PASSED = [
    Mistake("kv heads tiled", tiled_heads, (2.30, 1.38, 1.80)),
    Mistake("text keys normed as media's", text_normed_as_media, (0.35, 0.20, 0.17)),
    Mistake("text sees ahead", text_sees_ahead, (0.50, 0.60, 0.31)),
    Mistake("media see no later ones", causal_media, (2.16, 1.08, 1.00)),
    Mistake("media see no text", media_without_text, (1.02, 0.88, 0.80)),
    Mistake("clean tokens have a time", timed_clean_tokens, (0.49, 0.48, 0.42)),
    Mistake("padded by replication", replicated_padding, (2.38, 0.76, 0.39)),
]


@pytest.mark.parametrize("mistake", PASSED, ids=str)
def test_a_mistake_in_who_sees_what(folders, mistake):
    run = forward(folders["silu"])
    mistake.make(run)
    check(worst(run), mistake.errors)


def three_blocks(model: Cosmos3Transformer) -> None:
    model.rotary.axis = torch.tensor([0] * 4 + [1] * 2 + [2] * 2)


def feed_forward_of_text(model: Cosmos3Transformer) -> None:
    """The last layer's own, which is not loaded, is read from the checkpoint."""
    stored, last = tensors("silu/model"), list(model.media_blocks())[-1].mlp
    for text, media in zip(model.text_blocks(), model.media_blocks(), strict=False):
        media.mlp = text.mlp
    parts = [stored[f"layers.2.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    last.widen.replace_weight(torch.cat(parts))
    last.down.local.replace_weight(stored["layers.2.mlp.down_proj.weight"])


def norm_of_text(model: Cosmos3Transformer) -> None:
    model.media_norm.weight = parameter(tensors("silu/model")["norm.weight"])


def sines_first(model: Cosmos3Transformer) -> None:
    first = model.media.time.first
    first.replace_weight(first.dense_weight().roll(128, dims=1))


def channels_first(model: Cosmos3Transformer) -> None:
    order = torch.arange(24).view(6, 2, 2).permute(1, 2, 0).flatten()
    enter = model.media.enter
    enter.replace_weight(enter.dense_weight()[:, order])


def domains_transposed(model: Cosmos3Transformer) -> None:
    width = model.config.hidden_size
    for layer, inside in ((model.media.actions.enter, 12), (model.media.actions.leave, width)):
        as_linear = layer.weight.view(12, -1, inside)
        layer.weight = parameter(as_linear.transpose(1, 2).flatten(1))


def action_kind_forgotten(model: Cosmos3Transformer) -> None:
    model.media.actions.kind = parameter(torch.zeros(48))


def sound_kind_forgotten(model: Cosmos3Transformer) -> None:
    model.media.sound.kind = parameter(torch.zeros(48))


def parameter(x: Tensor) -> nn.Parameter:
    return nn.Parameter(x, requires_grad=False)


WEIGHTS = [
    Mistake("axes in three blocks", three_blocks, (0.71, 0.77, 0.50)),
    Mistake("feed-forward of text", feed_forward_of_text, (2.89, 1.59, 2.57)),
    Mistake("norm of text", norm_of_text, (1.21, 1.10, 0.85)),
    Mistake("sines first", sines_first, (3.10, 2.83, 2.30)),
    Mistake("channels first", channels_first, (4.09, 1.02, 1.46)),
    Mistake("domains transposed", domains_transposed, (1.10, 1.29, 3.67)),
    Mistake("kind of actions forgotten", action_kind_forgotten, (0.38, 0.25, 0.59)),
    Mistake("kind of sound forgotten", sound_kind_forgotten, (0.39, 0.66, 0.24)),
]


@pytest.mark.parametrize("mistake", WEIGHTS, ids=str)
def test_a_mistake_in_the_network(folders, mistake):
    run = forward(folders["silu"])
    mistake.make(run.transformer)
    check(worst(run), mistake.errors)


def keys_for_media_unnormed(model: Cosmos3Transformer) -> None:
    for layer in model.text_blocks():
        layer.media_k_norm = None
    model.last_text_layer.k_norm = None


class SiluMLP(nn.Module):
    def __init__(self, mlp) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp.down.forward(functional.silu(self.mlp.widen.forward(x)))


def silu_instead(model: Cosmos3Transformer) -> None:
    for layer in (*model.text_blocks(), *model.media_blocks()):
        layer.mlp = SiluMLP(layer.mlp)


def output_biases_dropped(model: Cosmos3Transformer) -> None:
    for layer in (*model.text_blocks(), *model.media_blocks()):
        drop_bias(layer.output.local)


def all_biases_dropped(model: Cosmos3Transformer) -> None:
    output_biases_dropped(model)
    for layer in (*model.text_blocks(), *model.media_blocks()):
        drop_bias(layer.qkv)
    drop_bias(model.last_text_layer.kv)


def drop_bias(linear: Linear) -> None:
    linear.bias = parameter(torch.zeros_like(linear.bias))


SQUARED = [
    Mistake("keys for media not normed", keys_for_media_unnormed, (0.38, 0.25, 0.67)),
    Mistake("silu instead", silu_instead, (1.60, 1.09, 1.65)),
    Mistake("biases of outputs dropped", output_biases_dropped, (1.61, 0.89, 0.79)),
    Mistake("biases dropped", all_biases_dropped, (1.24, 1.03, 1.00)),
]


@pytest.mark.parametrize("mistake", SQUARED, ids=str)
def test_a_mistake_in_the_relu2_family(folders, mistake):
    run = forward(folders["relu2"], "relu2")
    mistake.make(run.transformer)
    check(worst(run, "relu2"), mistake.errors)
