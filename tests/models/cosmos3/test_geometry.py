"""Which tokens, in which order, at which positions: all as they are stored, to the last bit."""

from __future__ import annotations

import math

import pytest
import torch

from phalanx.errors import CheckpointError, ConfigurationError
from phalanx.models.cosmos3.config import Cosmos3Config
from phalanx.models.cosmos3.geometry import (
    MediaShape,
    latent_grid,
    media_positions,
    sound_length,
)
from phalanx.models.cosmos3.patches import patchify, unpatchify
from tests.models.cosmos3.loop_shapes import SHAPES
from tests.models.cosmos3.standing_in import known_row
from tests.models.cosmos3.stored import document, tensors

PACKS = [
    (name, branch)
    for name in SHAPES
    for branch in ("cond", "uncond")
    if (name, branch) != ("loop_forward_dynamics", "uncond")
]
"""What is without guidance has one branch."""


def config(**changes) -> Cosmos3Config:
    return Cosmos3Config.from_json({**document("silu/config"), **changes})


@pytest.mark.parametrize(("name", "branch"), PACKS)
def test_positions_of_every_loop(name, branch):
    stored = tensors(f"{name}/io")
    und_len = int(stored[f"pack.{branch}.und_len"])
    positions = media_positions(config(), SHAPES[name], und_len)
    assert positions.dtype == torch.float32
    assert torch.equal(positions, stored[f"pack.{branch}.position_ids"][:, und_len:])
    assert SHAPES[name].num_tokens + und_len == int(stored[f"pack.{branch}.sequence_length"])


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_drawn_of_every_loop(name):
    stored, shape = tensors(f"{name}/io"), SHAPES[name]
    frames = [frame for start, stop in shape.noisy_frames for frame in range(start, stop)]
    rows = [row for start, stop in shape.noisy_rows for row in range(start, stop)]
    assert frames == stored["pack.cond.vision_noisy_frame_indexes.0"].tolist()
    if shape.action_rows:
        assert rows == stored["pack.cond.action_noisy_frame_indexes.0"].tolist()
    else:
        assert "pack.cond.action_noisy_frame_indexes.0" not in stored


@pytest.mark.parametrize("family", ["silu", "relu2"])
def test_positions_of_the_stored_forward(family):
    positions = media_positions(config(), known_row().shape, 7)
    assert torch.equal(positions, tensors(f"{family}/io")["in.position_ids"][:, 7:])


def test_the_fourth_action_is_at_the_second_latent_frame_and_a_state_at_the_first():
    shape = MediaShape((3, 2, 2), fps=15.0, action_rows=8)
    times = media_positions(config(), shape, 7)[0]
    assert times[3 + 3] == times[1]
    assert times[3 + 7] == times[2]
    stated = MediaShape((3, 2, 2), fps=15.0, action_rows=9, has_state=True)
    times = media_positions(config(), stated, 7)[0]
    assert times[3] == times[0]
    assert times[3 + 4] == times[1]


def test_single_items_and_no_modulation_are_at_whole_times():
    image = MediaShape((1, 2, 2), fps=15.0, sound_frames=1, action_rows=1)
    assert media_positions(config(), image, 7)[0].tolist() == [15007.0, 15007.0, 15008.0]
    clip = MediaShape((2, 2, 2), fps=15.0, sound_frames=2)
    plain = media_positions(config(enable_fps_modulation=False), clip, 7)
    assert plain[0].tolist() == [15007.0, 15008.0, 15007.0, 15008.0]


def test_rows_and_columns_may_go_on_from_the_start():
    shape = MediaShape((1, 4, 2), fps=15.0, action_rows=1)
    positions = media_positions(config(unified_3d_mrope_reset_spatial_ids=False), shape, 7)
    assert positions[1].tolist() == [15007.0, 15008.0, 15007.0]
    assert positions[2].tolist() == [15007.0, 15007.0, 15007.0]


@pytest.mark.parametrize(
    ("clip", "grid", "tokens"),
    [
        ((189, 720, 1280), (48, 45, 80), 44160),
        ((33, 480, 832), (9, 30, 52), 3510),
        ((33, 352, 640), (9, 22, 40), 1980),
        ((1, 16, 16), (1, 1, 1), 1),
    ],
)
def test_tokens_of_a_clip(clip, grid, tokens):
    assert latent_grid(*clip) == grid
    assert MediaShape(grid, fps=24.0).num_vision_tokens == tokens


def test_sound_has_25_latents_a_second():
    assert sound_length(9, 24.0) == 10
    assert sound_length(24, 24.0) == 25
    assert sound_length(189, 24.0) == math.ceil(189 / 24.0 * 25)


def test_patches_go_by_row_column_channel_and_come_back():
    latents = torch.arange(2 * 1 * 3 * 4, dtype=torch.float32).view(2, 1, 3, 4)
    patches = patchify(latents, 2)
    assert patches.shape == (4, 8)
    # Rows 0 and 1, columns 2 and 3, of both channels.
    assert patches[1].tolist() == [2, 14, 3, 15, 6, 18, 7, 19]
    assert patches[3].tolist() == [10, 22, 11, 23, 0, 0, 0, 0]
    assert torch.equal(unpatchify(patches, (2, 2), (3, 4), 2), latents)


def test_defaults_are_those_of_nano():
    assert Cosmos3Config.from_json({}) == Cosmos3Config()
    assert Cosmos3Config().patch_latent_dim == 192
    assert Cosmos3Config().q_rows == 4096


def test_unknown_keys_are_ignored_and_axes_are_found_where_a_file_has_them():
    raw = {**document("silu/config"), "not_a_size": {"at": "all"}}
    assert config() == Cosmos3Config.from_json(raw)
    del raw["rope_axes_dim"]
    raw["rope_scaling"] = {"mrope_section": [3, 3, 2]}
    assert Cosmos3Config.from_json(raw).rope_axes_dim == (3, 3, 2)
    del raw["action_dim"]
    assert Cosmos3Config.from_json({**raw, "max_action_dim": 9}).action_dim == 9


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 0}, "hidden_size=0 of a Cosmos3 transformer must be a whole number, 1"),
        ({"hidden_size": "48"}, "hidden_size='48'"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True"),
        ({"rms_norm_eps": -1e-3}, "rms_norm_eps=-0.001 .* a positive number"),
        ({"base_fps": math.inf}, "base_fps=inf .* a positive number"),
        ({"sound_gen": 1}, "sound_gen=1 .* true or false"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' .* one of silu, relu2"),
        ({"hidden_act": 3}, "hidden_act=3 .* a string"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads=4 .* a multiple of num_key_value_heads=3",
        ),
        ({"rope_axes_dim": [4, 2, 3]}, r"rope_axes_dim=\[4, 2, 3\] .* add up to head_dim / 2 = 8"),
        ({"rope_axes_dim": [0, 4, 4]}, "rope_axes_dim=.* at most 3 for height and 2 for width"),
        ({"rope_axes_dim": [2, 3, 3]}, "rope_axes_dim=.* at most 3 for height and 2 for width"),
        ({"rope_axes_dim": [4, 4]}, "rope_axes_dim=.* three whole numbers"),
        ({"rope_axes_dim": 8}, "rope_axes_dim=8 .* three whole numbers"),
        ({"patch_latent_dim": 25}, "patch_latent_dim=25 .* = 24"),
        ({"unified_3d_mrope_temporal_modality_margin": -1}, "margin=-1 .* 0 or more"),
    ],
)
def test_impossible_sizes_are_refused_by_name(changes, said):
    with pytest.raises(CheckpointError, match=said):
        config(**changes)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_nano_and_super_are_cut_over_up_to_eight_ranks(size):
    Cosmos3Config().check_tensor_parallel(size)
    huge = Cosmos3Config(hidden_size=5120, num_attention_heads=64, intermediate_size=25600)
    huge.check_tensor_parallel(size)


@pytest.mark.parametrize(
    ("size", "changes", "said"),
    [
        (16, {}, "size of 16 does not divide this model's num_key_value_heads=8; allowed: 1, 2, 4"),
        (3, {}, "size of 3 does not divide this model's num_key_value_heads=8"),
        (0, {}, "size of 0 does not divide"),
        (8, {"intermediate_size": 12}, "intermediate_size=12; allowed: 1, 2, 4"),
    ],
)
def test_ranks_that_do_not_divide_the_model_are_refused_in_words(size, changes, said):
    with pytest.raises(ConfigurationError, match=said):
        Cosmos3Config(**changes).check_tensor_parallel(size)
