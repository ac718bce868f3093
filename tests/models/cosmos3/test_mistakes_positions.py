"""As `test_mistakes_forward`: mistakes in sizes, and in where tokens are."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from phalanx.layers.interleaved_rotary import InterleavedRotary
from phalanx.models.cosmos3.geometry import MediaShape, media_positions
from tests.models.cosmos3.mistakes import Mistake, check, forward, worst
from tests.models.cosmos3.standing_in import (
    TOLERANCE,
    Forward,
    with_config,
)

VISION, SOUND, ACTION = slice(0, 12), slice(12, 17), slice(17, 25)


CONFIGURED = [
    Mistake("theta of 1e4", lambda: {"rope_theta": 1e4}, (0.49, 0.48, 0.30)),
    Mistake(
        "no margin",
        lambda: {"unified_3d_mrope_temporal_modality_margin": 0},
        (0.69, 0.65, 0.33),
    ),
    Mistake("no fps scaling", lambda: {"enable_fps_modulation": False}, (0.89, 0.53, 0.37)),
    Mistake(
        "spatial ids not reset",
        lambda: {"unified_3d_mrope_reset_spatial_ids": False},
        (0.62, 0.80, 0.66),
    ),
    Mistake("unscaled time", lambda: {"timestep_scale": 1.0}, (1.75, 2.02, 1.43)),
    Mistake("hard-coded epsilon", lambda: {"rms_norm_eps": 1e-6}, (2.2e-3, 1.8e-3, 1.8e-3)),
]


@pytest.mark.parametrize("mistake", CONFIGURED, ids=str)
def test_a_mistake_in_the_sizes(tmp_path, mistake):
    check(worst(forward(with_config(tmp_path, **mistake.make()))), mistake.errors)


def bf16_positions(run: Forward) -> Tensor:
    return run.positions.bfloat16().float()


def floored_positions(run: Forward) -> Tensor:
    return run.positions.floor()


def sound_behind_vision(run: Forward) -> Tensor:
    positions = run.positions.clone()
    positions[0, SOUND] += run.row.shape.video[0]
    return positions


def unshifted_actions(run: Forward) -> Tensor:
    shape = replace(run.row.shape, has_state=True)
    return media_positions(run.transformer.config, shape, len(run.ids))


def actions_by_their_own_rate(run: Forward) -> Tensor:
    positions = run.positions.clone()
    start = positions[0, VISION.start]
    positions[0, ACTION] = start + (positions[0, ACTION] - start) * 4
    return positions


PLACED = [
    Mistake("bf16 positions", bf16_positions, (0.96, 0.63, 0.56)),
    Mistake("positions floored", floored_positions, (0.34, 0.20, 0.14)),
    Mistake("sound behind vision", sound_behind_vision, (0.30, 1.00, 0.19)),
    Mistake("actions unshifted", unshifted_actions, (0.15, 0.11, 0.17)),
    Mistake("base stride of actions", actions_by_their_own_rate, (0.31, 0.25, 0.35)),
]


@pytest.mark.parametrize("mistake", PLACED, ids=str)
def test_a_mistake_in_the_positions(folders, mistake):
    run = forward(folders["silu"])
    run.positions = mistake.make(run)
    check(worst(run), mistake.errors)


class WideRotary(InterleavedRotary):
    """Angles in float64."""

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.double().t().index_select(1, self.axis) * self.wide
        return angles.cos().float(), angles.sin().float()

    def line(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.forward(positions.double().expand(3, -1))


def wide(run: Forward) -> Forward:
    config = run.transformer.config
    rotary = WideRotary(config.head_dim, config.rope_theta, config.rope_axes_dim)
    # From float32 frequencies: theirs is another question.
    rotary.wide = rotary.frequencies.double()
    run.transformer.rotary = rotary
    return run


def wide_positions(shape: MediaShape, und_len: int) -> Tensor:
    """The positions of the stored forward in float64."""
    start = und_len + 15000.0
    frames, rows, columns = shape.video[0], *shape.patch_grid
    placed = [
        (start + t / (shape.fps / 4) * 6.0, row, column)
        for t in range(frames)
        for row in range(rows)
        for column in range(columns)
    ]
    placed += [(start + k / 25.0 * 24.0, 0, 0) for k in range(shape.sound_frames)]
    placed += [(start + (k + 1) / shape.fps * 6.0, 0, 0) for k in range(shape.action_rows)]
    return torch.tensor(placed, dtype=torch.float64).t()


def test_positions_of_float64_are_others(folders):
    run = wide(forward(folders["silu"]))
    run.positions = wide_positions(run.row.shape, len(run.ids))
    found = worst(run)
    assert min(found) > 3 * TOLERANCE
    assert found == pytest.approx((2.4e-4, 9e-5, 1.3e-4), rel=0.1)


def test_angles_of_float64_do_no_harm(folders):
    assert max(worst(wide(forward(folders["silu"])))) < TOLERANCE / 4


def test_positions_of_these_tests_are_right(folders):
    run = forward(folders["silu"])
    exact = wide_positions(run.row.shape, len(run.ids))
    assert (exact - run.positions).abs().max() < math.ulp(15000.0) * 2**29
