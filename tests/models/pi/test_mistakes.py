"""The tolerance is narrow enough: each mistake that a port of pi0.5 can make exceeds it.

A mistake is made by other weights, other inputs, or by a node, a row or a part of a test's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from phalanx.layers.gemma import AdaptiveNorm, GemmaMLP
from phalanx.layers.linear import Linear
from phalanx.models.pi.building import LoadedPolicy, nodes_of
from phalanx.models.pi.expert_node import ExpertNode
from phalanx.models.pi.prefix_nodes import PrefixNode
from phalanx.models.pi.row import EXPERT_NODE, PREFIX_NODE, DenoiseTurn, PolicyRow
from phalanx.models.pi05.entry import PI05
from phalanx.models.pi05.expert import PI05Expert
from tests.models.pi.stored import (
    TOLERANCE,
    TracedRow,
    error_of,
    load,
    loaded,
    pixels,
    request,
    run,
    stored,
)

NAME = "pi05_micro_f32"
CHUNK = 10


def worst(policy: LoadedPolicy, asked=None, *, nodes=None, row: type[PolicyRow] = TracedRow):
    """The largest error of the actions."""
    chunks = run(policy, asked or request(NAME), nodes=nodes, row=row).finish()
    return max(
        error_of(actions, stored(NAME)["out.x_final_padded"][at])
        for at, actions in enumerate(chunks)
    )


def test_without_a_mistake_the_error_is_far_below_the_tolerance():
    assert worst(loaded(NAME)) < TOLERANCE / 4


def scaled(linear: Linear, factor: float) -> None:
    linear.replace_weight(linear.dense_weight() * factor)
    linear.bias.data.mul_(factor)


def unscaled_text(policy: LoadedPolicy) -> None:
    policy.model.language.embedding.data.div_(math.sqrt(64))


def images_divided(policy: LoadedPolicy) -> None:
    scaled(policy.model.eye.projector, 1 / math.sqrt(64))


def modulations(policy: LoadedPolicy) -> list[Linear]:
    return [one.dense for one in policy.model.expert.modules() if isinstance(one, AdaptiveNorm)]


def gates_ignored(policy: LoadedPolicy) -> None:
    for dense in modulations(policy):
        weight = dense.dense_weight().clone()
        weight[64:] = 0.0
        dense.replace_weight(weight)
        dense.bias.data[64:] = 1.0


def modulation_out_of_order(policy: LoadedPolicy) -> None:
    """Shift, scale, gate."""
    order = torch.cat([torch.arange(32, 64), torch.arange(32), torch.arange(64, 96)])
    for dense in modulations(policy):
        dense.replace_weight(dense.dense_weight()[order])
        dense.bias.data.copy_(dense.bias.data[order])


def sines_and_cosines_swapped(policy: LoadedPolicy) -> None:
    linear = policy.model.expert.time_in
    linear.replace_weight(linear.dense_weight().roll(16, dims=1))


class ErfMLP(nn.Module):
    def __init__(self, mlp: GemmaMLP) -> None:
        super().__init__()
        self.mlp = mlp
        self.inner_values = mlp.inner_values

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.mlp.gate_up.forward(x).chunk(2, dim=-1)
        return self.mlp.down.forward(functional.gelu(gate) * up)


def erf_gelu(policy: LoadedPolicy) -> None:
    for layer in (*policy.model.language.layers, *policy.model.expert.layers):
        layer.mlp = ErfMLP(layer.mlp)


WEIGHTS = (
    unscaled_text,
    images_divided,
    gates_ignored,
    modulation_out_of_order,
    sines_and_cosines_swapped,
    erf_gelu,
)


@pytest.mark.parametrize("mistake", WEIGHTS, ids=lambda mistake: mistake.__name__)
def test_a_mistake_in_the_network(mistake: Callable[[LoadedPolicy], None]):
    policy = load(NAME)
    mistake(policy)
    policy.model.expert.forget_conditions()
    assert worst(policy) > 4 * TOLERANCE


def padding_attended():
    return request(NAME, lang_lens=torch.tensor([200, 200]))


def empty_camera_unmasked():
    return request(NAME, image_masks=torch.ones(2, 3, dtype=torch.bool))


def images_resized_with_antialiasing():
    """33 x 47 pixels to 19 x 28, padded: as LeRobot does it, but for the filter."""
    images = stored(NAME)["in.front_u8"].permute(0, 3, 1, 2).float() / 255
    small = functional.interpolate(images, size=(19, 28), mode="bilinear", antialias=True)
    front = functional.pad(small.clamp(0, 1), (0, 0, 4, 5)) * 2 - 1
    changed = pixels(NAME)
    plain = functional.interpolate(images, size=(19, 28), mode="bilinear")
    assert torch.allclose(functional.pad(plain, (0, 0, 4, 5)) * 2 - 1, changed[:, 0], atol=1e-6)
    changed[:, 0] = front
    return request(NAME, pixel_values=changed)


INPUTS = (padding_attended, empty_camera_unmasked, images_resized_with_antialiasing)


@pytest.mark.parametrize("mistake", INPUTS, ids=lambda mistake: mistake.__name__)
def test_a_mistake_in_the_inputs(mistake):
    assert worst(loaded(NAME), mistake()) > 4 * TOLERANCE


class CausalPrefix(PrefixNode):
    def declare_step(self, walk, rows, inputs):
        return causal(super().declare_step(walk, rows, inputs))


class CausalSuffix(ExpertNode):
    def declare_step(self, walk, rows, inputs):
        return causal(super().declare_step(walk, rows, inputs))


def causal(step):
    return replace(
        step, resources={**step.resources, "kv": replace(step.resources["kv"], causal=True)}
    )


class PrefixAtPaddedPositions(PrefixNode):
    """Text counted behind three cameras, of which one is not there."""

    def preprocess(self, engine, inputs):
        prepared = super().preprocess(engine, inputs)
        seen = [row.num_prefix - len(row.inputs.token_ids) for row in inputs]
        counted = [
            np.where(np.arange(row.num_prefix) < images, 0, 4) + np.arange(row.num_prefix)
            for row, images in zip(inputs, seen, strict=True)
        ]
        return replace(prepared, positions=torch.from_numpy(np.concatenate(counted)))


class SuffixAtPaddedPositions(ExpertNode):
    """Actions counted behind all of the padded prefix."""

    def preprocess(self, engine, inputs):
        prepared = super().preprocess(engine, inputs)
        positions = torch.arange(212, 212 + CHUNK).repeat(len(inputs))
        return replace(prepared, tensors=replace(prepared.tensors, positions=positions))


NODES = {
    CausalPrefix: PREFIX_NODE,
    CausalSuffix: EXPERT_NODE,
    PrefixAtPaddedPositions: PREFIX_NODE,
    SuffixAtPaddedPositions: EXPERT_NODE,
}


@pytest.mark.parametrize("mistaken", NODES, ids=lambda mistaken: mistaken.__name__)
def test_a_mistake_in_a_node(mistaken):
    policy = loaded(NAME)
    nodes = {**nodes_of(policy), NODES[mistaken]: mistaken(policy.model, policy.backend)}
    assert worst(policy, nodes=nodes) > 4 * TOLERANCE


class WithoutLastSilu(PI05Expert):
    def time_condition(self, time: float) -> Tensor:
        embedded = self.embedded_time(time)
        return self.time_out.forward(functional.silu(self.time_in.forward(embedded)))


class EmbeddedInFloat32(PI05Expert):
    def embedded_time(self, time: float) -> Tensor:
        fraction = torch.linspace(0.0, 1.0, 16)
        period = 4e-3 * (4.0 / 4e-3) ** fraction
        angle = (1.0 / period * 2 * math.pi) * torch.tensor(time)
        return torch.cat((angle.sin(), angle.cos()))[None]


EXPERTS = (WithoutLastSilu, EmbeddedInFloat32)


@pytest.mark.parametrize("mistaken", EXPERTS, ids=lambda mistaken: mistaken.__name__)
def test_a_mistake_in_the_expert(mistaken):
    assert worst(load(NAME, replace(PI05, make_expert=mistaken))) > TOLERANCE


class AccumulatedTime(TracedRow):
    """Adds the steps up in float32."""

    time = np.float32(1.0)

    def turn(self) -> DenoiseTurn:
        turn = replace(super().turn(), time=float(self.time))
        self.time = self.time + np.float32(turn.advance)
        return turn


def test_time_that_is_accumulated_in_float32():
    assert worst(loaded(NAME), row=AccumulatedTime) > TOLERANCE
