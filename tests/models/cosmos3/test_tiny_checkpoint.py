"""The random checkpoint of `phalanx.testing` is one that this package, and diffusers, would load."""

from __future__ import annotations

import safetensors.numpy

from phalanx.processing.text import TextTokenizer
from phalanx.testing.tiny_cosmos3 import (
    VISION_START,
    Cosmos3Sizes,
    cosmos3_tiny,
    write_tiny_cosmos3,
)
from tests.models.cosmos3.stored import document, tensors

_LIKE_STORED = Cosmos3Sizes(
    num_hidden_layers=3, intermediate_size=80, vocab_size=96, num_embodiment_domains=12
)


def test_it_has_the_tensors_that_diffusers_stores(tmp_path):
    directory = write_tiny_cosmos3(tmp_path, _LIKE_STORED)
    for folder, known in (("transformer", "silu"), ("vae", "vae")):
        path = directory / folder / "diffusion_pytorch_model.safetensors"
        shapes = {name: x.shape for name, x in safetensors.numpy.load_file(path).items()}
        stored = {name: tuple(x.shape) for name, x in tensors(f"{known}/model").items()}
        assert shapes == stored


def test_rotary_axes_are_those_of_the_published_proportions():
    assert Cosmos3Sizes().transformer["rope_axes_dim"] == document("silu/config")["rope_axes_dim"]
    assert Cosmos3Sizes(head_dim=128).transformer["rope_axes_dim"] == [24, 20, 20]


def test_its_tokenizer_has_the_marker_of_pictures(tmp_path):
    tokenizer = TextTokenizer(write_tiny_cosmos3(tmp_path) / "text_tokenizer")
    assert tokenizer.token_id(VISION_START) == 3
    assert tokenizer.vocab_size == 400
    assert tokenizer.chat_template is not None


def test_the_known_name_is_made_once(tmp_path):
    told: list[tuple[int, int]] = []
    directory = cosmos3_tiny(tmp_path, lambda *at: told.append(at))
    made = (directory / "vae" / "config.json").stat().st_ino
    assert cosmos3_tiny(tmp_path, lambda *at: told.append(at)) == directory
    assert (directory / "vae" / "config.json").stat().st_ino == made
    assert [path.name for path in directory.parent.iterdir()] == ["cosmos3-tiny"]
    assert told == [(1, 1)]
