"""Requests that can never be answered, refused by name before they are queued."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx.errors import ConfigurationError, InvalidRequestError
from phalanx.models.cosmos3.action_validation import check_action_request
from phalanx.models.cosmos3.args import Cosmos3Args, Cosmos3PolicyArgs
from phalanx.models.cosmos3.config import Cosmos3Config
from phalanx.models.cosmos3.validation import check_video_request, limits_of
from tests.models.cosmos3.requests import action_request, limits, video_request
from tests.models.cosmos3.stored import document

NAN = float("nan")


def test_right_requests_are_taken():
    check_video_request(video_request(), limits())
    check_video_request(
        video_request(guidance_scale=1, neg_text_ids=None, neg_text_mask=None), limits()
    )
    kept = video_request(cond_latents=torch.zeros(1, 6, 2, 3, 4), cond_frame_indexes=(0, 1))
    check_video_request(kept, limits())
    check_video_request(
        video_request(sound_frames=10, sound_dim=5, sound_noise=torch.zeros(1, 5, 10)), limits()
    )
    check_action_request(action_request(), limits())
    check_action_request(action_request(state=torch.zeros(1, 10)), limits())
    forward = action_request(mode="forward_dynamics", cond_action=torch.zeros(1, 3, 10))
    check_action_request(forward, limits())
    clip = torch.zeros(1, 3, 9, 48, 64)
    check_action_request(action_request(mode="inverse_dynamics", cond_video_pixels=clip), limits())


def test_padding_counts_for_nothing():
    ids = torch.tensor([[1, 2, 3, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 0, 0]])
    check_video_request(video_request(text_ids=ids, text_mask=mask), limits(max_text_tokens=5))


@pytest.mark.parametrize("grid", [(1, 3, 3), (2, 5, 3), (1, 4, 4)])
def test_even_and_odd_grids_are_taken(grid):
    check_video_request(video_request(video_shape=grid), limits())


@pytest.mark.parametrize(
    ("field", "message", "changes"),
    [
        ("text_ids", "int64 of shape (1, tokens)", {"text_ids": torch.zeros(9).long()}),
        ("text_ids", "is torch.float32", {"text_ids": torch.zeros(1, 9)}),
        ("text_ids", "one request is one prompt", {"text_ids": torch.zeros(2, 9).long()}),
        ("text_ids", "integers from 0 to 95", {"text_ids": torch.full((1, 9), 96)}),
        ("text_ids", "holds -1", {"text_ids": torch.full((1, 9), -1)}),
        ("text_mask", "padding is on the right", {"text_mask": torch.tensor([[0, *[1] * 8]])}),
        ("text_mask", "at least one", {"text_mask": torch.zeros(1, 9).long()}),
        ("text_mask", "beside text_ids", {"text_mask": torch.ones(1, 8).long()}),
        (
            "text_ids",
            "max_text_tokens=16",
            {"text_ids": torch.zeros(1, 17).long(), "text_mask": torch.ones(1, 17).long()},
        ),
        ("neg_text_ids", "guidance_scale=6.0", {"neg_text_ids": None, "neg_text_mask": None}),
        ("neg_text_mask", "is NoneType", {"neg_text_mask": None}),
        ("guidance_scale", "at least 0", {"guidance_scale": NAN}),
        ("guidance_scale", "at least 0", {"guidance_scale": -1.0}),
        ("num_inference_steps", "from 1 to 1000", {"num_inference_steps": 0}),
        ("num_inference_steps", "from 1 to 1000", {"num_inference_steps": 2.0}),
        ("seed", "=-1 must be", {"seed": -1}),
        ("fps", "more than 0", {"fps": 0.0}),
        ("flow_shift", "more than 0", {"flow_shift": 0.0}),
        ("guidance_interval", "the lower one first", {"guidance_interval": (5, 3)}),
        ("guidance_interval", "two integer", {"guidance_interval": (0.5, 3)}),
        ("guidance_interval", "=7 must", {"guidance_interval": 7}),
        ("video_shape", "(F - 1) // 4 + 1", {"video_shape": (3, 3)}),
        ("video_shape", "(3, 0, 4)", {"video_shape": (3, 0, 4)}),
        ("video_shape", "5 x 4 x 4 = 80 tokens", {"video_shape": (5, 7, 8)}),
        ("noise", "give (1, 6, 3, 3, 4)", {"noise": torch.zeros(1, 6, 3, 3, 5)}),
        ("noise", "is torch.int64", {"noise": torch.zeros(1, 6, 3, 3, 4).long()}),
        ("noise", "not finite at [0, 0, 0, 0, 0]", {"noise": torch.full((1, 6, 3, 3, 4), NAN)}),
        ("cond_frame_indexes", "from 0 to 2", {"cond_frame_indexes": (3,)}),
        ("cond_frame_indexes", "different", {"cond_frame_indexes": (1, 1)}),
        ("cond_frame_indexes", "where there are any", {"cond_frame_indexes": (0,)}),
        ("cond_frame_indexes", "=() must name", {"cond_latents": torch.zeros(1, 6, 1, 3, 4)}),
        (
            "cond_latents",
            "frame 1 is to be kept",
            {"cond_latents": torch.zeros(1, 6, 1, 3, 4), "cond_frame_indexes": (1,)},
        ),
        (
            "cond_video_pixels",
            "give one of both",
            {
                "cond_latents": torch.zeros(1, 6, 1, 3, 4),
                "cond_video_pixels": torch.zeros(1, 3, 1, 48, 64),
                "cond_frame_indexes": (0,),
            },
        ),
        (
            "cond_video_pixels",
            "give 5 to 9 frames",
            {"cond_video_pixels": torch.zeros(1, 3, 1, 48, 64), "cond_frame_indexes": (1,)},
        ),
        (
            "cond_latents",
            "give 1 to 3",
            {"cond_latents": torch.zeros(1, 6, 4, 3, 4), "cond_frame_indexes": (1,)},
        ),
        ("sound_dim", "has 5", {"sound_frames": 10}),
        ("sound_latent_fps", "has 25.0", {"sound_frames": 1, "sound_dim": 5, "sound_latent_fps": 8}),
        ("sound_frames", "from 1 to", {"sound_frames": 0}),
        ("sound_noise", "without sound_frames", {"sound_noise": torch.zeros(1, 5, 10)}),
        ("output", "pixels, latents", {"output": "mp4"}),
    ],
)  # fmt: skip
def test_r19_a_video_that_cannot_be_made_is_refused_by_name(field, message, changes):
    with pytest.raises(InvalidRequestError) as refused:
        check_video_request(video_request(**changes), limits())
    assert refused.value.field == field
    assert message in str(refused.value)
    assert str(refused.value).startswith(field)


@pytest.mark.parametrize(
    ("field", "message", "changes"),
    [
        ("mode", "policy, forward_dynamics, inverse_dynamics", {"mode": "dream"}),
        ("domain_id", "from 0 to 11", {"domain_id": 12}),
        ("raw_action_dim", "from 1 to 12", {"raw_action_dim": 13}),
        ("action_dim", "have 12 numbers", {"action_dim": 64}),
        ("action_chunk", "from 1 to", {"action_chunk": 0}),
        ("video_shape", "goes with 17 frames, which are 5", {"action_chunk": 16}),
        ("cond_video_pixels", "are both None", {"cond_video_pixels": None}),
        ("cond_video_pixels", "both given", {"cond_video_latents": torch.zeros(1, 6, 1, 3, 4)}),
        ("cond_video_pixels", "at least 48", {"cond_video_pixels": torch.zeros(1, 3, 1, 32, 64)}),
        ("cond_video_pixels", "multiple of 16", {"cond_video_pixels": torch.zeros(1, 3, 1, 50, 64)}),
        ("cond_video_pixels", "[-1, 1]", {"cond_video_pixels": torch.full((1, 3, 1, 48, 64), 255.0)}),
        ("cond_video_pixels", "give float (1, 3", {"cond_video_pixels": torch.zeros(3, 48, 64)}),
        ("cond_video_pixels", "give 9 to 9", {"mode": "inverse_dynamics"}),
        ("cond_video_pixels", "give 1 to 9", {"cond_video_pixels": torch.zeros(1, 3, 10, 48, 64)}),
        ("cond_video_pixels", "give 5 to 9", {"cond_frame_indexes": (1,)}),
        ("cond_action", "is None", {"mode": "forward_dynamics"}),
        ("cond_action", "is given", {"cond_action": torch.zeros(1, 8, 10)}),
        (
            "cond_action",
            "1 to 8 actions, 10",
            {"mode": "forward_dynamics", "cond_action": torch.zeros(1, 9, 10)},
        ),
        (
            "cond_action",
            "give (1, 2, 10)",
            {"mode": "forward_dynamics", "cond_action": torch.zeros(1, 2, 12)},
        ),
        ("state", "give (1, 10)", {"state": torch.zeros(1, 8)}),
        (
            "state",
            "is for mode='policy'",
            {
                "state": torch.zeros(1, 10),
                "mode": "forward_dynamics",
                "cond_action": torch.zeros(1, 8, 10),
            },
        ),
        ("action_noise", "give (1, 8, 12)", {"action_noise": torch.zeros(1, 8, 10)}),
        ("neg_text_ids", "guidance_scale=3", {"guidance_scale": 3}),
    ],
)  # fmt: skip
def test_r19_actions_that_cannot_be_given_are_refused_by_name(field, message, changes):
    with pytest.raises(InvalidRequestError) as refused:
        check_action_request(action_request(**changes), limits())
    assert refused.value.field == field
    assert message in str(refused.value)


def test_too_large_a_video_is_refused_with_its_numbers():
    nano = limits_of(Cosmos3Config(), Cosmos3Args("somewhere", max_tokens=40000))
    request = video_request(video_shape=(48, 45, 80))
    with pytest.raises(InvalidRequestError, match=r"48 x 23 x 40 = 44160 .* max_tokens=40000"):
        check_video_request(request, nano)


def test_sound_and_actions_count_as_tokens():
    check_video_request(video_request(), limits(max_tokens=12))
    with pytest.raises(InvalidRequestError, match="with sound and actions 22"):
        check_video_request(video_request(sound_frames=10, sound_dim=5), limits(max_tokens=21))
    check_action_request(action_request(), limits(max_tokens=20))
    with pytest.raises(InvalidRequestError, match="with sound and actions 21"):
        check_action_request(action_request(state=torch.zeros(1, 10)), limits(max_tokens=20))


def test_a_checkpoint_without_sound_or_actions_says_so():
    plain = replace(
        Cosmos3Config.from_json(document("silu/config")), action_gen=False, sound_gen=False
    )
    bounds = limits_of(plain, Cosmos3Args("somewhere"))
    with pytest.raises(InvalidRequestError, match="makes no sound"):
        check_video_request(video_request(sound_frames=3), bounds)
    with pytest.raises(InvalidRequestError, match="has no actions; serve `cosmos3`"):
        check_action_request(action_request(), bounds)


@pytest.mark.parametrize(
    ("message", "values"),
    [
        ("max_batch_size=0", {"max_batch_size": 0}),
        ("max_tokens=True", {"max_tokens": True}),
        ("native_operators='on'", {"native_operators": "on"}),
        ("of at least 2048", {"pool_tokens": 2047}),
    ],
)
def test_arguments_are_checked(message, values):
    with pytest.raises(ConfigurationError, match=message):
        Cosmos3PolicyArgs("somewhere", **values)
