"""From requests to what is computed of them: noise, what is clean, schedules, texts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx.layers.unipc import FlowSchedule, SchedulerConfig
from phalanx.models.cosmos3.config import Cosmos3Config
from phalanx.models.cosmos3.noise import NoiseSource
from phalanx.models.cosmos3.row import MediaRequest
from phalanx.models.cosmos3.row_maker import RowMaker
from tests.models.cosmos3.requests import action_request, video_request
from tests.models.cosmos3.stored import document, tensors

CPU = torch.device("cpu")
LATENTS = torch.full((1, 6, 3, 3, 4), 0.5)


@pytest.fixture(scope="module")
def maker():
    config = Cosmos3Config.from_json(document("silu/config"))
    return RowMaker(config, SchedulerConfig.from_json(document("scheduler")), CPU)


def begun(inputs):
    return MediaRequest(inputs).turn().media


@pytest.mark.parametrize(
    "request_",
    [
        video_request(sound_frames=5, sound_dim=5, cond_latents=LATENTS, cond_frame_indexes=(0,)),
        action_request(state=torch.ones(1, 10)),
        action_request(mode="forward_dynamics", cond_action=torch.ones(1, 3, 10)),
    ],
)
def test_a_request_that_waits_holds_nothing_of_the_device(request_):
    """Nor one that was pushed back."""
    config = Cosmos3Config.from_json(document("silu/config"))
    scheduler = SchedulerConfig.from_json(document("scheduler"))
    row = MediaRequest(RowMaker(config, scheduler, torch.device("meta")).make(request_))
    if row.inputs.pixels is not None:
        row.take({"known": torch.zeros(6, 1, 3, 4, device="meta")})
    assert not any(one.is_meta for one in tensors_of(row.latents))
    assert all(one.is_meta for one in tensors_of(row.turn().media))
    row.push_back()
    assert not any(one.is_meta for one in tensors_of(row.latents))


def tensors_of(media):
    return [one for one in (media.vision, media.sound, media.actions) if one is not None]


def test_noise_is_drawn_in_order_by_one_generator(maker):
    made = maker.make(video_request(seed=7, sound_frames=5, sound_dim=5))
    generator = torch.Generator().manual_seed(7)
    vision = torch.randn((1, 6, 3, 3, 4), generator=generator)
    sound = torch.randn((5, 5), generator=generator)
    assert torch.equal(made.noise.vision, vision[0])
    assert torch.equal(made.noise.sound, sound)
    assert torch.equal(begun(made).vision, vision[0])


def test_noise_that_is_given_leaves_the_rest_as_it_was(maker):
    drawn = maker.make(video_request(seed=7, sound_frames=5, sound_dim=5))
    given = maker.make(video_request(seed=7, sound_frames=5, sound_dim=5, noise=LATENTS.double()))
    assert torch.equal(given.noise.vision, LATENTS[0])
    assert torch.equal(given.noise.sound, drawn.noise.sound)


def test_a_seed_decides_and_another_one_differs():
    first, again, other = (NoiseSource(seed).take(None, (40,)) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_clean_frames_begin_as_they_are_given(maker):
    request = video_request(cond_latents=LATENTS[:, :, :2], cond_frame_indexes=(1,))
    media = begun(maker.make(request))
    assert media.shape.clean_frames == {1}
    assert (media.vision[:, 1] == 0.5).all()
    assert not (media.vision[:, [0, 2]] == 0.5).any()


def test_actions_are_drawn_where_the_embodiment_has_some(maker):
    made = maker.make(action_request(cond_video_pixels=None, cond_video_latents=LATENTS))
    media = begun(made)
    assert media.actions.shape == (8, 12)
    assert (media.actions[:, :10] != 0).all() and not media.actions[:, 10:].any()
    assert (media.domain, media.shape.noisy_frames) == (8, ((1, 3),))
    assert media.shape.noisy_rows == ((0, 8),)


def test_a_state_stands_in_front_of_the_actions_and_is_clean(maker):
    state = torch.arange(10.0)[None]
    request = action_request(cond_video_pixels=None, cond_video_latents=LATENTS)
    plain, made = maker.make(request), maker.make(replace(request, state=state))
    media = begun(made)
    assert media.shape.has_state and media.shape.action_rows == 9
    assert torch.equal(media.actions[0, :10], state[0]) and not media.actions[0, 10:].any()
    assert torch.equal(media.actions[1:], begun(plain).actions)
    assert media.shape.noisy_rows == ((1, 9),)


def test_given_actions_are_clean_and_the_last_goes_on(maker):
    given = torch.arange(30.0).view(1, 3, 10)
    made = maker.make(action_request(mode="forward_dynamics", cond_action=given))
    made = replace(made, known=LATENTS[0])
    media = begun(made)
    assert torch.equal(media.actions[:3, :10], given[0])
    assert (media.actions[3:, :10] == given[0, -1]).all() and not media.actions[:, 10:].any()
    assert not media.shape.noisy_rows and media.shape.clean_frames == {0}


def test_inverse_dynamics_draws_actions_alone(maker):
    made = maker.make(
        action_request(mode="inverse_dynamics", cond_video_pixels=None, cond_video_latents=LATENTS)
    )
    row = MediaRequest(made)
    assert not made.shape.noisy_frames
    assert list(row.turn().states) == ["actions"]


def test_pixels_are_encoded_before_anything_else(maker):
    row = MediaRequest(maker.make(action_request()))
    work = row.next_work()
    assert (work.node, work.walk) == ("encode", "encode")
    row.take({"known": LATENTS[0]})
    row.advance(work.remaining)
    assert row.next_work().walk == "read"
    assert (row.turn().media.vision[:, 0] == 0.5).all()
    row.push_back()
    assert row.next_work().walk == "encode"


def test_pixels_that_are_asked_for_are_decoded_last(maker):
    row = MediaRequest(maker.make(video_request(num_inference_steps=2)))
    walks = []
    while (work := row.next_work()) is not None:
        walks.append((work.node, work.walk))
        row.advance(work.remaining)
    assert [walk for _, walk in walks] == ["read", "denoise", "denoise", "decode"]
    latents = MediaRequest(maker.make(video_request(num_inference_steps=1, output="latents")))
    assert latents._route()[-1].value == "denoise"


def test_texts_end_where_their_padding_begins(maker):
    mask = torch.tensor([[1, 1, 1, 0, 0, 0, 0, 0, 0]])
    made = maker.make(video_request(text_mask=mask))
    assert (made.prompt, made.negative) == ((0, 1, 2), (0, 1, 2, 3, 4))
    assert maker.make(video_request(guidance_scale=1.0)).negative is None


def test_a_shift_of_the_request_goes_before_the_checkpoints_schedule(maker):
    shipped, shifted = maker.make(video_request()), maker.make(video_request(flow_shift=5.0))
    config = SchedulerConfig(use_karras_sigmas=False, flow_shift=5.0)
    assert torch.equal(shipped.schedule.sigmas, FlowSchedule.karras(SchedulerConfig(), 4).sigmas)
    assert torch.equal(shifted.schedule.sigmas, FlowSchedule.shifted(config, 4).sigmas)


def test_a_shift_of_the_request_leaves_a_native_schedule_native():
    config = Cosmos3Config.from_json(document("silu/config"))
    maker = RowMaker(config, SchedulerConfig(use_karras_sigmas=False, native=True), CPU)
    made = maker.make(video_request(flow_shift=5.0))
    assert torch.equal(made.schedule.sigmas, tensors("schedules")["native5.4.sigmas"])
