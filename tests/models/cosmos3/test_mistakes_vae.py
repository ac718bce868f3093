"""The tolerance of the autoencoder is narrow enough: each mistake that a port can make exceeds it.

The errors next to each mistake are known, so that it is the one that is meant.
"""

from __future__ import annotations

import pytest
import torch

from phalanx.models.cosmos3 import conditioning
from phalanx.models.cosmos3.vae.checkpoint import load_vae
from phalanx.models.cosmos3.vae.upsampling import Upsampler
from tests.models.cosmos3.stored import tensors


@pytest.fixture
def vae(folders):
    return load_vae(folders["silu"], torch.device("cpu"), torch.float32)


def largest(difference: torch.Tensor) -> float:
    return difference.abs().max().item()


def test_patch_offsets_in_the_other_order(vae):
    for weight in vae.encoder.conv_in.weights:
        swapped = weight.view(weight.shape[0], 3, 2, 2, 3, 3).transpose(2, 3)
        weight.copy_(swapped.reshape(weight.shape))
    stored = tensors("vae/io")
    wrong = vae.encode(stored["pixels"][0]) - stored["normalized"][0]
    std = torch.tensor(vae.config.latents_std)[:, None, None, None]
    assert largest(wrong * std) == pytest.approx(1.18, rel=0.06)


class FirstFrameIsHistory(Upsampler):
    """Frames behind the first see it."""

    def _doubled(self, x, conv, stream):
        if stream.begins:
            stream.passed(conv, x[:1], 2)
        return super()._doubled(x, conv, stream)


def test_first_frame_as_history_of_the_others(vae):
    for block in vae.decoder.up_blocks[:2]:
        block.upsampler.__class__ = FirstFrameIsHistory
    stored = tensors("vae/io")
    assert largest(vae.decode(stored["normalized"][0]) - stored["decoded"][0]) == pytest.approx(
        1.43, rel=0.06
    )


def test_observation_encoded_without_its_canvas(vae):
    stored = tensors("loop_policy/io")["cond.latents_full"][0, :, :1, :3, :4]
    image = tensors("conditioning")["image"]
    bare = vae.encode(image[:, None] * 2 - 1)
    assert largest(bare - stored) == pytest.approx(1.14, rel=0.06)


def test_image_that_is_not_rounded(vae):
    stored = tensors("loop_i2v_karras/io")["cond.latents_full"][0, :, :1]
    image = tensors("conditioning")["image"]
    exact = vae.encode(image[:, None] * 2 - 1)
    assert largest(exact - stored) == pytest.approx(3e-3, rel=0.5)
    rounded = vae.encode(conditioning.image_frame(image, 48, 64))
    assert largest(rounded - stored) < 2e-5
