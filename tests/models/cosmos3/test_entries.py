"""The plugins keep the contract of batching entries, and answer what they were asked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx.engine_config import use_engine_config
from phalanx.models.cosmos3.args import Cosmos3Args, Cosmos3PolicyArgs
from phalanx.models.cosmos3.entry import Cosmos3, Cosmos3Policy
from phalanx.models.cosmos3.request import DenoiseProgress
from phalanx.schema.events import Delta, Final
from phalanx.testing import check_batching_entry
from tests.models.cosmos3.loops import FLOAT32, TOLERANCE, Loop, largest
from tests.models.cosmos3.requests import action_request, video_request

LATENTS = torch.full((1, 6, 3, 3, 4), 0.5)


def policy_request(loop: Loop = Loop("loop_policy"), **changes):
    """What the stored loop was asked."""
    io = loop.io
    texts = {
        name: (ids[None], torch.ones_like(ids[None]))
        for name, ids in (("", io["cond_ids"]), ("neg_", io["uncond_ids"]))
    }
    request = action_request(
        text_ids=texts[""][0],
        text_mask=texts[""][1],
        neg_text_ids=texts["neg_"][0],
        neg_text_mask=texts["neg_"][1],
        guidance_scale=loop.case["call"]["guidance_scale"],
        fps=15.0,
        flow_shift=5.0,
        noise=io["noise.vision"],
        action_noise=io["noise.action"][None],
        cond_video_pixels=None,
        cond_video_latents=io["noise.vision"][:, :, :1],
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
