"""The node of language models passes the check that a plugin author runs on their own."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from phalanx.models.causal_lm.node import DecoderNode
from phalanx.models.causal_lm.sequence import NODE, Own, Sequence, SequenceLimits
from phalanx.schema.generate import GenerateRequest
from phalanx.schema.sampling import SamplingParams
from phalanx.step.resources.attention import AttentionSpec
from phalanx.step.resources.kv_cache import KVConfig, KVSpec
from phalanx.step.resources.positions import PositionSpec
from phalanx.step.resources.sampler import SamplerSpec
from phalanx.testing import ModelParts, SubmoduleCase, check_submodule
from tests.models.driver import load

PROMPTS = {"a": (3, 1, 4, 1, 5, 9, 2), "b": (27, 18), "c": (2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4)}
SETTINGS = {
    "a": {"temperature": 0.0},
    "b": {"sampling_seed": 5},
    "c": {"temperature": 0.7, "top_k": 20, "sampling_seed": 6, "repetition_penalty": 1.2},
}


class Tokens(Sequence):
    """A completion whose output is its tokens alone: what else is told may differ by company."""

    def output(self, *, cancelled):
        return tuple(self.output_ids)


def sequence(name: str) -> Tokens:
    sampling = SamplingParams(max_new_tokens=5, ignore_eos=True, **SETTINGS[name])
    request = GenerateRequest(input_ids=PROMPTS[name], sampling=sampling)
    return Tokens(name, request, PROMPTS[name], SequenceLimits(frozenset({2}), 200), Own(None))


@pytest.fixture(scope="module", params=["off", "auto"])
def model(request, tiny_dir):
    return load(tiny_dir, native_operators=request.param)


@pytest.mark.long
def test_a_language_model_passes_the_check(model):
    nodes, config = frozenset({NODE}), model.config
    cache = KVConfig(
        num_layers=config.num_layers,
        num_kv_heads=model.decoder.num_kv_heads,
        head_dim=config.head_dim,
        num_pages=60,
        page_size=4,
        max_seq_len=64,
        dtype=torch.float32,
    )
    specs = (
        KVSpec("kv", nodes, cache),
        AttentionSpec("attention", nodes, "kv", model.operators),
        PositionSpec("positions", nodes),
        SamplerSpec("sampler", nodes, config.vocab_size),
    )

    def parts() -> ModelParts:
        return ModelParts({NODE: DecoderNode(model.decoder, model.backend, 8)}, specs)

    capture = "tape" if model.operators.capturable else "off"
    requests = [partial(sequence, name) for name in PROMPTS]
    check_submodule(SubmoduleCase(parts, requests, capture=capture))
