"""Parts that policies share: times, schedules, modulated norms, blocks of tokens."""

from __future__ import annotations

import math

import pytest
import torch

from phalanx.device.operators.torch_operators import TorchOperators
from phalanx.layers.flow_matching import flow_time, time_embedding
from phalanx.layers.gemma import AdaptiveNorm, Modulation
from phalanx.layers.real_time_chunking import Schedule, guidance_weight, prefix_weights
from phalanx.layers.token_blocks import token_blocks


def test_times_do_not_accumulate_errors():
    assert flow_time(0, 10) == 1.0
    assert flow_time(7, 10) == float(torch.tensor(1.0 - 7 * 0.1, dtype=torch.float64).float())
    assert flow_time(999, 1000) == pytest.approx(0.001, rel=1e-4)


def test_a_time_is_embedded_in_float64():
    embedded = time_embedding(0.3, 8, 4e-3, 4.0)
    periods = [4e-3 * 1000 ** (at / 3) for at in range(4)]
    angles = [2 * math.pi / period * 0.3 for period in periods]
    expected = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)])
    assert embedded.dtype == torch.float32
    assert torch.allclose(embedded, expected, atol=1e-7, rtol=0)


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize(("delay", "horizon"), [(0, 4), (2, 2), (3, 2), (0, 99), (9, 9)])
def test_weights_fall_from_the_delay_to_the_horizon(schedule, delay, horizon):
    weights = prefix_weights(schedule, delay, horizon, 6)
    horizon = min(horizon, 6)
    assert torch.equal(weights[: min(delay, horizon)], torch.ones(min(delay, horizon)))
    assert torch.equal(weights[horizon:], torch.zeros(6 - horizon))
    assert bool((weights.diff() <= 0).all())


def test_guidance_is_bounded_where_its_formula_is_not():
    assert guidance_weight(1.0, 10.0) == 10.0
    assert guidance_weight(0.5, 10.0) == pytest.approx(2.0)
    assert guidance_weight(0.0, 10.0) == 10.0
    assert guidance_weight(0.5, 1.5) == 1.5


def test_a_norm_is_modulated_row_by_row():
    norm, x = AdaptiveNorm(4, 1e-6, TorchOperators()), torch.randn(6, 4)
    factor, shift = torch.randn(2, 1, 4), torch.randn(2, 1, 4)
    found = norm.forward(x, Modulation(factor, shift, shift))
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = normed.view(2, 3, 4) * factor + shift
    assert torch.allclose(found, expected.view(6, 4), atol=1e-6)
    uniform = Modulation(factor.expand(2, 3, 4), shift.expand(2, 3, 4), shift)
    assert torch.allclose(norm.forward(x, uniform), found)


@pytest.mark.parametrize("tokens", [1, 552, 4097])
def test_blocks_are_all_tokens_in_order_and_none_is_large(tokens):
    x = torch.arange(tokens)[:, None]
    blocks = list(token_blocks(x, 8192))
    assert torch.equal(torch.cat(blocks), x)
    assert max(map(len, blocks)) <= 512 and min(map(len, blocks)) >= max(map(len, blocks)) // 2
    blocks[0].add_(1)
    assert int(x[0]) == 1
