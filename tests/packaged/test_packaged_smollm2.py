"""The packaged model itself: the tokenizer it was trained with, and its exact weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from phalanx import settings
from phalanx.models.causal_lm.packaged import find_source, smollm2_135m, smollm2_135m_separate


def silent(done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def fused() -> Path:
    return smollm2_135m(settings.cache_dir(), silent)


def test_digits_are_split_first(fused):
    """The byte-level split alone would tear the white space before a number apart."""
    tokenizer = Tokenizer.from_file(str(fused / "tokenizer.json"))
    assert tokenizer.encode("a  12").ids == [81, 256, 33, 34]
    assert tokenizer.encode("a 12").ids == [81, 216, 33, 34]
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert tokenizer.encode("a  12").ids == [81, 216, 216, 33, 34]


def test_size_of_the_weights(fused):
    assert (fused / "model.safetensors").stat().st_size == 538_082_112


@pytest.mark.long
def test_transformers_reads_the_same_weights_from_the_package():
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    source = find_source()
    assert source is not None
    directory = smollm2_135m_separate(settings.cache_dir(), silent)
    ours = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(
        source.path.parent,
        gguf_file=source.path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
