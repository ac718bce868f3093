"""The toy decoder as parts: a causal language model on the paged cache, with a sampler."""

from __future__ import annotations

from phalanx.device.operators.torch_operators import TorchOperators
from phalanx.step.resources.attention import AttentionSpec
from phalanx.step.resources.kv_cache import KVSpec
from phalanx.step.resources.positions import PositionSpec
from phalanx.step.resources.sampler import SamplerSpec
from phalanx.testing.model_parts import ModelParts
from phalanx.testing.models.parts import kv_config
from phalanx.testing.token_request import NODE
from phalanx.testing.toy_decoder import (
    NUM_LAYERS,
    TOY_CAPTURES,
    VOCAB_SIZE,
    ToyDecoder,
    ToyWeights,
)


def decoder_parts(num_pages: int, host_pages: int = 0, seed: int = 0) -> ModelParts:
    """The model of one `ToyDecoder`; its requests are `TokenRequest` with a sampler's settings."""
    nodes = frozenset({NODE})
    operators = TorchOperators()
    return ModelParts(
        {NODE: ToyDecoder(operators, ToyWeights(seed), captures=TOY_CAPTURES)},
        (
            KVSpec("kv", nodes, kv_config(NUM_LAYERS, num_pages, host_pages)),
            AttentionSpec("attention", nodes, "kv", operators),
            PositionSpec("positions", nodes),
            SamplerSpec("sampler", nodes, VOCAB_SIZE),
        ),
    )
