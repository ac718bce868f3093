"""The plugins keep the contract of batching entries, and answer what they were asked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx.engine_config import use_engine_config
from phalanx.models.cosmos3.args import Cosmos3Args, Cosmos3PolicyArgs
from phalanx.models.cosmos3.conditioning import fit_observation
from phalanx.models.cosmos3.entry import Cosmos3, Cosmos3Policy
from phalanx.models.cosmos3.request import DenoiseProgress
from phalanx.schema.events import Delta, Final
from phalanx.testing import check_batching_entry
from tests.models.cosmos3.loops import FLOAT32, TOLERANCE, Loop, largest
from tests.models.cosmos3.requests import action_request, video_request
from tests.models.cosmos3.stored import tensors

POLICY = Loop("loop_policy")
LATENTS = torch.full((1, 6, 3, 3, 4), 0.5)


def texts_of(loop: Loop) -> dict[str, torch.Tensor]:
    """The prompts of a stored loop, as requests have them."""
    ids = {"": loop.io["cond_ids"][None], "neg_": loop.io["uncond_ids"][None]}
    found = {f"{prefix}text_ids": one for prefix, one in ids.items()}
    return found | {f"{prefix}text_mask": torch.ones_like(one) for prefix, one in ids.items()}


def policy_request(loop: Loop = POLICY, **changes):
    """What the stored loop was asked."""
    noise = loop.io["noise.vision"]
    request = action_request(
        **texts_of(loop),
        guidance_scale=loop.case["call"]["guidance_scale"],
        fps=15.0,
        flow_shift=5.0,
        noise=noise,
        action_noise=loop.io["noise.action"][None],
        cond_video_pixels=None,
        cond_video_latents=noise[:, :, :1],
    )
    return replace(request, **changes)


def video(**changes):
    return video_request(output="latents", **changes)


def entry_of(plugin, args):
    entry = plugin()
    with use_engine_config(FLOAT32):
        entry.setup(args)
    return entry


def ended(entry, request):
    """Everything that came of a request."""
    entry.validate(request, entry.limits)
    entry.start("one", request)
    events = []
    while entry.busy:
        events += entry.tick()
    entry.close()
    return events


@pytest.fixture
def policy(folders):
    return entry_of(Cosmos3Policy, Cosmos3PolicyArgs(folders["silu"], max_tokens=64))


def test_the_plugin_of_videos_keeps_the_contract(folders):
    def entry():
        return entry_of(Cosmos3, Cosmos3Args(folders["silu"], max_batch_size=2, max_tokens=64))

    given = [
        video(),
        video(cond_latents=LATENTS, cond_frame_indexes=(0,), guidance_scale=1.0),
        video(sound_frames=4, sound_dim=5, num_inference_steps=2),
    ]
    check_batching_entry(entry, given)


def test_the_plugin_of_actions_keeps_the_contract(folders):
    def entry():
        args = Cosmos3PolicyArgs(folders["silu"], max_batch_size=3, max_tokens=64)
        return entry_of(Cosmos3Policy, args)

    given = [
        policy_request(),
        policy_request(
            cond_action=torch.ones(1, 8, 10), mode="forward_dynamics", action_noise=None
        ),
        policy_request(mode="inverse_dynamics", cond_video_latents=LATENTS),
    ]
    check_batching_entry(entry, given)


def test_a_policy_answers_with_the_stored_actions_and_says_how_far_it_is(policy):
    *deltas, final = ended(policy, policy_request())[1:]
    loop = Loop("loop_policy")
    assert isinstance(final, Final)
    assert largest(final.payload.action[0] - loop.io["out.action"]) < TOLERANCE
    assert largest(final.payload.video - loop.io["out.video"]) < TOLERANCE
    assert final.payload.pixels is None
    timesteps = loop.io["timesteps"].tolist()
    assert deltas == [
        Delta("one", DenoiseProgress(at, 4, timestep)) for at, timestep in enumerate(timesteps, 1)
    ]


def test_a_state_is_not_among_the_actions_that_are_answered(policy):
    loop = Loop("loop_policy_state")
    noise = loop.io["noise.action"]
    asked = policy_request(loop, state=noise[:1, :10], action_noise=noise[None, 1:])
    final = ended(policy, asked)[-1]
    assert final.payload.action.shape == (1, 8, 10)
    assert largest(final.payload.action[0] - loop.io["out.action"][1:]) < TOLERANCE


def test_forward_dynamics_answers_with_a_video_alone(policy):
    loop = Loop("loop_forward_dynamics")
    given = loop.io["noise.action"][None, :, :10]
    asked = policy_request(loop, mode="forward_dynamics", cond_action=given, action_noise=None)
    final = ended(policy, asked)[-1]
    assert final.payload.action is None
    assert largest(final.payload.video - loop.io["out.video"]) < TOLERANCE


def test_inverse_dynamics_keeps_the_video_as_it_was(policy):
    asked = policy_request(mode="inverse_dynamics", cond_video_latents=LATENTS)
    final = ended(policy, asked)[-1]
    assert torch.equal(final.payload.video, LATENTS)
    assert final.payload.action.shape == (1, 8, 10)


def test_a_video_has_the_sound_that_was_asked_for(folders):
    entry = entry_of(Cosmos3, Cosmos3Args(folders["silu"], max_tokens=64))
    final = ended(entry, video(sound_frames=4, sound_dim=5))[-1]
    assert final.payload.video.shape == (1, 6, 3, 3, 4)
    assert final.payload.sound.shape == (1, 5, 4)


def test_a_video_is_answered_in_pixels(folders):
    """Those of the stored loop, from its noise."""
    loop = Loop("loop_t2v")
    args = Cosmos3Args(folders["silu"], max_tokens=64)
    request = video_request(
        **texts_of(loop),
        noise=loop.io["noise.vision"],
        flow_shift=10.0,
        guidance_scale=6.0,
    )
    *deltas, final = ended(entry_of(Cosmos3, args), request)[1:]
    assert [one.payload.step for one in deltas] == [1, 2, 3, 4]  # and nothing of its decoding
    stored = loop.io["out.video"].transpose(0, 1)[None]
    assert final.payload.video.shape == stored.shape == (1, 3, 9, 48, 64)
    assert largest(final.payload.video - stored) < TOLERANCE


@pytest.mark.parametrize("vae_tiling", [False, True])
def test_a_policy_sees_pixels_and_answers_with_some(folders, vae_tiling):
    """The stored canvas: what is beyond its content is encoded, and has no tokens."""
    loop, given = Loop("loop_policy"), tensors("conditioning")
    args = Cosmos3PolicyArgs(
        folders["silu"], max_tokens=64, decode_video=True, vae_tiling=vae_tiling
    )
    seen = fit_observation(given["image"][None], 256)
    assert seen.content == (3, 4)
    asked = policy_request(cond_video_latents=None, cond_video_pixels=seen.pixels[None])
    final = ended(entry_of(Cosmos3Policy, args), asked)[-1]
    assert largest(final.payload.action[0] - loop.io["out.action"]) < TOLERANCE
    assert final.payload.pixels.shape == (1, 3, 9, 48, 64)
