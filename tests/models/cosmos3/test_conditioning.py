"""What a request is conditioned on: pixels as diffusers made them, and the latents of them."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from torch.nn import functional

from phalanx.errors import InvalidRequestError
from phalanx.models.cosmos3.conditioning import (
    TIERS,
    canvas_of,
    clean_latents,
    clip_frames,
    fit_observation,
    frames_of,
    image_frame,
    padded_actions,
)
from phalanx.models.cosmos3.vae.checkpoint import load_vae
from tests.models.cosmos3.stored import tensors

TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def vae(folders):
    return load_vae(folders["silu"], torch.device("cpu"), torch.float32)


def largest(difference: torch.Tensor) -> float:
    return difference.abs().max().item()


def random_pixels(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def test_an_image_is_rounded_to_8_bits():
    image, stored = tensors("conditioning")["image"], tensors("loop_i2v_karras/io")
    frame = image_frame(image, 48, 64)
    assert torch.equal(frame, stored["cond.pixels"][0, :, :1])
    levels = (image * 255).round().byte()
    assert largest(image_frame(levels, 48, 64) - frame) < 1e-6


@pytest.mark.parametrize(
    ("size", "covering", "offset"),
    [
        ((100, 200), (48, 96), (0, 16)),
        ((33, 47), (48, 69), (0, 2)),
        ((33, 46), (48, 67), (0, 2)),
        ((480, 240), (128, 64), (40, 0)),
        ((77, 50), (99, 64), (26, 0)),
    ],
)
def test_an_image_covers_the_frame_and_is_cut_around_its_middle(size, covering, offset):
    image = random_pixels(3, *size)
    scaled = functional.interpolate(image[None] * 255, covering, mode="bilinear", antialias=True)[0]
    top, left = offset
    cut = scaled[:, top : top + 48, left : left + 64]
    wanted = cut.round() / 255 * 2 - 1
    assert torch.equal(image_frame(image, 48, 64)[:, 0], wanted)


@pytest.mark.parametrize(("keep", "first"), [("first", 0), ("last", 2)])
def test_a_video_goes_on_from_its_first_or_last_frames(keep, first):
    clip = random_pixels(7, 3, 48, 64)
    kept = clip_frames(clip, 48, 64, keep=keep)
    assert torch.equal(kept, (clip[first : first + 5] * 2 - 1).transpose(0, 1))


def test_a_short_video_lasts_on():
    clip = random_pixels(3, 3, 48, 64)
    kept = clip_frames(clip, 48, 64)
    assert kept.shape == (3, 5, 48, 64)
    assert torch.equal(kept[:, 3], kept[:, 2]) and torch.equal(kept[:, 4], kept[:, 2])


@pytest.mark.parametrize(
    ("size", "tier", "canvas"),
    [
        ((360, 640), 480, (480, 832)),
        ((464, 320), 256, (320, 256)),
        ((288, 320), 256, (256, 256)),
        ((880, 976), 256, (256, 256)),
        ((480, 640), 720, (832, 1104)),
        ((640, 360), 704, (1280, 704)),
    ],
)
def test_the_canvas_is_the_one_of_nearest_shape(size, tier, canvas):
    assert canvas_of(*size, tier) == canvas


@pytest.mark.parametrize(
    ("size", "tier", "canvas", "content"),
    [
        ((360, 640), 480, (480, 832), (22, 40)),
        ((360, 640), 256, (192, 320), (11, 20)),
        ((1080, 1920), 480, (480, 832), (29, 52)),
        ((100, 700), 256, (192, 320), (2, 20)),
        ((257, 319), 256, (256, 320), (16, 19)),
        ((17, 33), 256, (192, 320), (1, 2)),
        ((1168, 2048), 256, (192, 320), (11, 20)),
    ],
)
def test_an_observation_fills_its_canvas(size, tier, canvas, content):
    seen = fit_observation(random_pixels(1, 3, *size), tier)
    assert (seen.canvas, seen.content) == (canvas, content)


def test_a_small_observation_is_not_scaled_up():
    clip = random_pixels(1, 3, 48, 64)
    seen = fit_observation(clip, 256).pixels[:, 0]
    assert torch.equal(seen[:, :48, :64], clip[0] * 2 - 1)
    # There is less of it than of what is to be filled, so its edges go on.
    assert torch.equal(seen[:, :48, 64:], seen[:, :48, 63:64].expand(3, 48, 256))
    assert torch.equal(seen[:, 48:], seen[:, 47:48].expand(3, 208, 320))


def test_an_observation_is_mirrored_where_it_is_large_enough():
    clip = random_pixels(1, 3, 240, 320)
    seen = fit_observation(clip, 256).pixels[:, 0]
    assert torch.equal(seen[:, 240:], clip[0, :, 223:239].flip(1) * 2 - 1)


def test_a_large_observation_is_scaled_down_and_not_rounded():
    clip = random_pixels(1, 3, 352, 640)
    small = functional.interpolate(clip * 2 - 1, (176, 320), mode="bicubic", antialias=True)
    assert torch.equal(fit_observation(clip, 256).pixels[:, 0, :176], small[0])


def test_odd_sides_of_levels_are_scaled_as_pillow_does():
    levels = (random_pixels(1, 3, 361, 641) * 255).byte()
    image = Image.fromarray(levels[0].permute(1, 2, 0).numpy()).resize((640, 352), Image.BILINEAR)
    wanted = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(352, 640, 3)
    seen = fit_observation(levels, 480).pixels[:, 0, :352, :640]
    assert largest(seen - (wanted.permute(2, 0, 1) / 255 * 2 - 1)) < 2.1 / 255


def test_odd_sides_of_floats_are_scaled_by_the_nearest_pixels():
    clip = random_pixels(1, 3, 361, 641)
    wanted = functional.interpolate(clip * 2 - 1, (352, 640))[0]
    assert torch.equal(fit_observation(clip, 480).pixels[:, 0, :352, :640], wanted)


def test_an_observation_lasts_as_long_as_is_asked_for():
    clip = random_pixels(3, 3, 48, 64)
    assert torch.equal(fit_observation(clip, 256, 2).pixels, fit_observation(clip[:2], 256).pixels)
    longer = fit_observation(clip, 256, 5).pixels
    assert torch.equal(longer[:, 4], longer[:, 2])


def test_an_observation_is_encoded_on_its_canvas(vae):
    stored = tensors("loop_policy/io")["cond.latents_full"][0]
    seen = fit_observation(tensors("conditioning")["image"][None], 256, 9)
    assert largest(vae.encode(seen.pixels) - stored) < TOLERANCE
    known = clean_latents(vae, seen.pixels, {0}, seen.content)
    assert known.shape == (6, 1, 3, 4)
    assert largest(known - stored[:, :1, :3, :4]) < TOLERANCE


def test_only_frames_up_to_the_last_clean_one_are_encoded(vae):
    pixels = tensors("vae/io")["pixels"][0]
    whole = vae.encode(pixels)
    later = pixels.clone()
    later[:, frames_of({1}) :] = torch.nan
    known = clean_latents(vae, later, {0, 1}, (3, 4))
    assert largest(known - whole[:, :2]) < 2e-6
    first = clean_latents(vae, pixels[:, :1].expand(3, 9, 48, 64), {0}, (3, 4))
    assert largest(first - whole[:, :1]) < 2e-6


def test_a_clip_that_is_short_of_its_clean_frames_lasts_on(vae):
    pixels = tensors("vae/io")["pixels"][0, :, :3]
    lasting = torch.cat((pixels, pixels[:, 2:].expand(3, 2, 48, 64)), 1)
    known = clean_latents(vae, pixels, {1}, (3, 4))
    assert largest(known - vae.encode(lasting)) < 2e-6


def test_actions_are_repeated_cut_and_filled_up():
    raw = tensors("conditioning")["raw_actions"]
    longer = padded_actions(raw, 8, 12)
    assert longer.shape == (8, 12)
    assert torch.equal(longer[:6, :10], raw) and not longer[:, 10:].any()
    assert torch.equal(longer[6, :10], raw[5]) and torch.equal(longer[7, :10], raw[5])
    assert torch.equal(padded_actions(raw, 4, 10), raw[:4])


def test_forward_dynamics_was_given_these_actions():
    """Noise of a loop whose actions are clean is the actions themselves."""
    raw = tensors("conditioning")["raw_actions"]
    assert torch.equal(
        padded_actions(raw, 8, 12), tensors("loop_forward_dynamics/io")["noise.action"]
    )


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: canvas_of(480, 640, 512), "resolution_tier=512; allowed: 256, 480, 704, 720"),
        (lambda: fit_observation(torch.zeros(1, 3, 15, 40), 256), "15 x 40 pixels is smaller"),
        (lambda: image_frame(torch.zeros(4, 48, 64), 48, 64), "image has shape (1, 4, 48, 64)"),
        (lambda: clip_frames(torch.zeros(1, 3, 4, 4).long(), 16, 16), "video is torch.int64"),
        (lambda: padded_actions(torch.zeros(0, 3), 2, 4), "cond_action has 0 rows of 3"),
        (lambda: padded_actions(torch.zeros(2, 5), 2, 4), "at most action_dim=4"),
    ],
)
def test_what_cannot_be_conditioned_on_is_refused(call, said):
    with pytest.raises(InvalidRequestError) as refused:
        call()
    assert said in str(refused.value)


def test_canvases_are_whole_latents():
    assert all(side % 16 == 0 for tier in TIERS.values() for canvas in tier for side in canvas)
