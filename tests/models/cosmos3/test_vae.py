"""The autoencoder gives what diffusers gave, whatever the pieces are that a clip goes through in."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.errors import CheckpointError
from phalanx.models.cosmos3.vae.checkpoint import load_vae
from phalanx.models.cosmos3.vae.config import VaeConfig
from phalanx.models.cosmos3.vae.patches import from_patches, to_patches
from phalanx.models.cosmos3.vae.stream import Stream
from tests.models.cosmos3.stored import checkpoint, document, tensors

CPU = torch.device("cpu")
TOLERANCE = 2e-5
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def vae(folders):
    return load_vae(folders["silu"], CPU, torch.bfloat16)


def largest(difference: torch.Tensor) -> float:
    return difference.abs().max().item()


@pytest.mark.parametrize("piece", [None, 1, 2])
def test_encodes_to_the_mode_normalised(vae, piece):
    stored = tensors("vae/io")
    latents = vae.encode(stored["pixels"][0], piece)
    assert largest(latents - stored["normalized"][0]) < TOLERANCE
    mean, std = (
        torch.tensor(document("vae/config")[name])[:, None, None, None]
        for name in ("latents_mean", "latents_std")
    )
    assert largest(latents * std + mean - stored["mode"][0]) < TOLERANCE


@pytest.mark.parametrize("piece", [None, 1, 2])
def test_decodes_to_pixels(vae, piece):
    stored = tensors("vae/io")
    pixels = vae.decode(stored["normalized"][0], piece)
    assert pixels.dtype == torch.float32
    assert largest(pixels - stored["decoded"][0]) < TOLERANCE


def test_decodes_the_video_of_a_loop(vae):
    stored = tensors("loop_t2v/io")
    pixels = vae.decode(stored["step3.latents.vision"][0]) / 2 + 0.5
    assert largest(pixels - stored["out.video"].transpose(0, 1)) < TOLERANCE


def test_black_frames_are_what_a_loop_without_condition_encoded(vae):
    stored = tensors("loop_t2v/io")["cond.latents_full"][0]
    assert largest(vae.encode(torch.zeros(3, 9, 48, 64)) - stored) < TOLERANCE


@pytest.mark.parametrize("frames", [1, 5])
def test_first_frames_alone_give_the_first_latents(vae, frames):
    pixels = tensors("vae/io")["pixels"][0]
    first = vae.encode(pixels[:, :frames])
    assert largest(first - vae.encode(pixels)[:, : first.shape[1]]) < 2e-6


def test_first_latents_alone_give_the_first_frames(vae):
    latents = tensors("vae/io")["normalized"][0]
    first = vae.decode(latents[:, :2])
    assert first.shape == (3, 5, 48, 64)
    assert largest(first - vae.decode(latents)[:, :5]) < 2e-6


def test_sides_of_one_latent(vae):
    latents = torch.randn(6, 2, 1, 1, generator=torch.Generator().manual_seed(0))
    assert vae.decode(latents).shape == (3, 5, 16, 16)
    assert vae.encode(torch.zeros(3, 5, 16, 16)).shape == latents.shape


def test_a_cpu_computes_in_float32_and_takes_half_precision(tmp_path):
    folder = checkpoint(tmp_path)
    weights = load_file(folder / "vae" / WEIGHTS)
    save_file({name: one.bfloat16() for name, one in weights.items()}, folder / "vae" / WEIGHTS)
    vae = load_vae(folder, CPU, torch.bfloat16)
    assert vae.dtype == torch.float32
    stored = tensors("vae/io")
    assert 0 < largest(vae.encode(stored["pixels"][0]) - stored["normalized"][0]) < 5e-2


def test_patches_go_back_to_pixels():
    pixels = torch.randn(2, 3, 8, 12)
    patches = to_patches(pixels, 2)
    # Colors outside, then columns, then rows.
    assert torch.equal(patches[:, 4 * 1 + 2 * 1 + 0], pixels[:, 1, 0::2, 1::2])
    assert torch.equal(from_patches(patches, 2), pixels)


def test_tensors_that_do_not_fit_are_named(tmp_path):
    folder = checkpoint(tmp_path)
    weights = load_file(folder / "vae" / WEIGHTS)
    del weights["encoder.conv_in.weight"]
    weights["encoder.conv_inn.weight"] = torch.zeros(1)
    name = "decoder.up_blocks.0.upsampler.resample.1.weight"
    weights[name] = weights[name][:, :3].contiguous()
    save_file(weights, folder / "vae" / WEIGHTS)
    with pytest.raises(CheckpointError) as refused:
        load_vae(folder, CPU, torch.float32)
    said = str(refused.value)
    assert "missing encoder.conv_in.weight" in said
    assert "unexpected encoder.conv_inn.weight" in said
    assert f"{name} of (16, 3, 3, 3) instead of (16, 16, 3, 3)" in said


def test_a_checkpoint_without_its_autoencoder_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"vae/config.json cannot be read"):
        load_vae(tmp_path, CPU, torch.float32)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("is_residual", False, "is_residual=False must be true"),
        ("attn_scales", [1.0], "attn_scales=(1.0,) must be empty"),
        ("latents_mean", [0.0], "latents_mean=(0.0,) must be z_dim=6 numbers"),
        ("latents_std", [0.0] * 6, "above 0"),
        ("temperal_downsample", [True], "temperal_downsample=(True,) must be one value a level"),
        ("in_channels", 3, "in_channels=3 must be 3 * patch_size^2 = 12"),
        ("z_dim", "six", "Expected `int`, got `str` - at `$.z_dim`"),
    ],
)
def test_impossible_sizes_are_refused_by_name(field, value, said):
    with pytest.raises(CheckpointError) as refused:
        VaeConfig.from_json({**document("vae/config"), field: value})
    assert said in str(refused.value)


def test_sizes_as_published():
    """Those of Wan 2.2, of which 16 x 16 pixels and 4 frames are a latent."""
    tiny = VaeConfig.from_json(json.loads(json.dumps(document("vae/config"))))
    published = replace(
        tiny,
        z_dim=48,
        base_dim=160,
        decoder_base_dim=256,
        dim_mult=(1, 2, 4, 4),
        latents_mean=(0.0,) * 48,
        latents_std=(1.0,) * 48,
    )
    assert (published.spatial_factor, published.temporal_factor) == (16, 4)
    assert published.encoder_dims == (160, 160, 320, 640, 640)
    assert published.decoder_dims == (1024, 1024, 1024, 512, 256)


def test_memory_does_not_grow_with_the_clip(vae):
    """A large picture goes through a latent at a time, and leaves two frames in each layer."""
    assert (vae._piece(720, 1280), vae._piece(256, 256)) == (1, 4)
    stream, latents = Stream(), torch.zeros(1, 6, 3, 4)
    held = []
    for _ in range(4):
        vae.decoder(latents, stream)
        held.append(sum(frames.numel() for frames in stream._frames.values()))
    assert held[1] < held[2] == held[3]
    assert all(len(frames) == 2 for frames in stream._frames.values())
    owned = [frames.untyped_storage().nbytes() for frames in stream._frames.values()]
    assert sum(owned) == 4 * held[3]
