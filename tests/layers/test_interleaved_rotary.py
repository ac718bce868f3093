"""Rotary positions of three axes: which frequency turns with which, and how exactly."""

from __future__ import annotations

import math

import pytest
import torch

from phalanx.layers.interleaved_rotary import InterleavedRotary
from phalanx.layers.rotary import RopeParameters, RotaryEmbedding


@pytest.mark.parametrize(
    ("head_dim", "axes"), [(128, (24, 20, 20)), (16, (4, 2, 2)), (16, (6, 0, 2)), (16, (3, 3, 2))]
)
def test_every_third_frequency_turns_with_height_and_width(head_dim, axes):
    rotary = InterleavedRotary(head_dim, 5e6, axes)
    turned = [rotary.axis.tolist().count(axis) for axis in range(3)]
    assert turned == list(axes)
    for index, axis in enumerate(rotary.axis.tolist()):
        third = index % 3
        assert axis == (third if third and index < 3 * axes[third] else 0)


def test_angles_are_positions_times_frequencies_in_float32():
    rotary = InterleavedRotary(16, 5e6, (4, 2, 2))
    positions = torch.tensor([[15007.6, 3.0], [2.0, 5.0], [1.0, 7.0]])
    cos, sin = rotary(positions)
    assert cos.is_contiguous() and sin.is_contiguous()
    for token in range(2):
        for index, axis in enumerate((0, 1, 2, 0, 1, 2, 0, 0)):
            frequency = torch.tensor(1.0) / torch.tensor(5e6) ** torch.tensor(2 * index / 16)
            angle = (positions[axis, token] * frequency).item()
            assert cos[token, index].item() == pytest.approx(math.cos(angle), abs=2e-7)
            assert sin[token, index].item() == pytest.approx(math.sin(angle), abs=2e-7)


def test_a_line_is_one_position_on_all_axes_and_what_text_models_have():
    rotary = InterleavedRotary(16, 5e6, (4, 2, 2))
    positions = torch.arange(40)
    plain = RotaryEmbedding(16, 40, RopeParameters(theta=5e6))(positions)
    for line, three, known in zip(
        rotary.line(positions), rotary(positions.float().expand(3, -1)), plain, strict=True
    ):
        assert torch.equal(line, three)
        assert torch.equal(line, known)
