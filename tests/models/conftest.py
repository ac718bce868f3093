"""Models that the tests share: the packaged one, and a random one of a few kilobytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phalanx import checkpoints
from phalanx.models.causal_lm.loading import LoadedModel
from phalanx.testing.tiny_tokenizer import write_byte_level_tokenizer
from tests.models.driver import load
from tests.models.references import save_first_layers, smollm2_reference


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """Converted the first time (half a minute); a missing package fails the tests."""
    return checkpoints.checkpoint_dir("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2(smollm2_dir) -> LoadedModel:
    """With the operators that this machine has: native ones where there is a compiler."""
    return load(smollm2_dir)


@pytest.fixture(scope="session")
def smollm2_reference_model(smollm2_dir):
    return smollm2_reference(smollm2_dir)


@pytest.fixture(scope="session")
def shallow_dir(smollm2_dir, tmp_path_factory) -> Path:
    """SmolLM2 without most of its layers: as wide, with its tokenizer and its whole vocabulary.

    What it says makes no sense, and costs a tenth.
    """
    return save_first_layers(smollm2_dir, tmp_path_factory.mktemp("shallow"), 2)


@pytest.fixture(scope="session")
def shallow(shallow_dir) -> LoadedModel:
    return load(shallow_dir)


@pytest.fixture(scope="session")
def shallow_reference_model(shallow_dir):
    return smollm2_reference(shallow_dir)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory) -> Path:
    """A Llama of two layers with random weights and a byte-level tokenizer; it speaks noise."""
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
        initializer_range=0.6,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return write_byte_level_tokenizer(directory)


@pytest.fixture(scope="session")
def tiny(tiny_dir) -> LoadedModel:
    return load(tiny_dir)
