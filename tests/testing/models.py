"""The small models and requests of every kind for each."""

from __future__ import annotations

import torch

from phalanx.loop.walks import LeftContext, WalkProgram, WalkRequest
from phalanx.step.resources.kv_cache import KVConfig, KVSpec
from phalanx.step.resources.penalties import Penalties
from phalanx.step.resources.positions import PositionSpec
from phalanx.step.resources.sampler import SamplerConfig
from phalanx.step.resources.sampling import RowFilter
from phalanx.testing import ModelParts, SubmoduleCase
from phalanx.testing.models import (
    RECURRENT_PLACE,
    FlowRequest,
    TranslateRequest,
    VectorRequest,
    decoder_parts,
    encoder_decoder_parts,
    guided_flow_parts,
    recurrent_parts,
    stateless_parts,
)
from phalanx.testing.step_models import CacheReader
from phalanx.testing.token_request import NODE, TokenRequest
from phalanx.testing.two_partitions import (
    CONSUMER,
    MAX_COUNT,
    PRODUCER,
    SpeechModel,
    SpeechRequest,
    Talker,
    Vocoder,
    speech_partitions,
)


class Scored(TokenRequest):
    """Its output has the logits too: they tell more than the tokens that were chosen from them."""

    def output(self, *, cancelled):
        return tuple(self.outputs), [numbers["logits"] for numbers in self.numbers]


class ScoredTranslation(TranslateRequest):
    """Likewise."""

    def output(self, *, cancelled):
        return tuple(self.outputs), self.logits


SAMPLERS = (
    SamplerConfig(RowFilter(0.0), seed=0),
    SamplerConfig(RowFilter(1.0), seed=1),
    SamplerConfig(RowFilter(0.9, top_k=8), 2, Penalties(repetition=1.3)),
)

DECODER = SubmoduleCase(
    lambda: decoder_parts(60),
    [
        lambda: Scored((3, 1, 4, 1, 5), 4, sampler=SAMPLERS[0]),
        lambda: Scored((27,), 5, sampler=SAMPLERS[1]),
        lambda: Scored((2, 7, 1, 8, 2, 8, 1, 8, 2), 3, sampler=SAMPLERS[2]),
    ],
    tolerance=1e-5,
)
ENCODER_DECODER = SubmoduleCase(
    lambda: encoder_decoder_parts(40),
    [
        lambda: ScoredTranslation((3, 1, 4, 1, 5), 4),
        lambda: ScoredTranslation((27,), 3),
        lambda: ScoredTranslation((), 3),
        lambda: ScoredTranslation((2, 7, 1, 8, 2, 8), 5),
    ],
    tolerance=1e-5,
)
GUIDED_FLOW = SubmoduleCase(
    lambda: guided_flow_parts(60, 6),
    [
        lambda: FlowRequest((1, 2, 3), (4, 5), 3, negative=(6,), seed=1),
        lambda: FlowRequest((1, 2, 3), (9, 8, 7), 2, seed=2),
        lambda: FlowRequest((5, 5, 5, 5, 5), (), 4, negative=(), scale=1.5, seed=3),
        lambda: FlowRequest((), (4,), 3, negative=(1, 2, 3), scale=0.5, seed=4),
    ],
    tolerance=1e-5,
)
RECURRENT = SubmoduleCase(
    lambda: recurrent_parts(6),
    [
        lambda: Scored((3, 1, 4, 1, 5), 4, place=RECURRENT_PLACE),
        lambda: Scored((27,), 3, place=RECURRENT_PLACE),
        lambda: Scored((2, 7, 1, 8, 2, 8), 5, place=RECURRENT_PLACE),
    ],
    tolerance=1e-5,
)
STATELESS = SubmoduleCase(
    stateless_parts,
    [
        lambda: VectorRequest([0.1] * 8, 3),
        lambda: VectorRequest(range(8), 5),
        lambda: VectorRequest([-0.5] * 8, 2),
    ],
    tolerance=1e-5,
)

CACHE_READER = SubmoduleCase(
    lambda: ModelParts(
        {NODE: CacheReader()},
        (
            KVSpec("kv", frozenset({NODE}), KVConfig(1, 1, 2, 40, 4, 64, torch.float64)),
            PositionSpec("positions", frozenset({NODE})),
        ),
    ),
    [
        lambda: TokenRequest((3, 1, 4, 1, 5), 4),
        lambda: TokenRequest((27,), 5),
        lambda: TokenRequest((2, 7, 1, 8, 2, 8, 1, 8, 2), 3),
    ],
)

SPEECH_NODES = frozenset({PRODUCER})
SPEECH_SPECS = (
    KVSpec("kv", SPEECH_NODES, KVConfig(1, 1, 2, 40, 4, MAX_COUNT, torch.float64)),
    PositionSpec("positions", SPEECH_NODES),
)
SPEECH_PROGRAM = WalkProgram(
    speech_partitions(LeftContext(3, 1)), (PRODUCER, CONSUMER), SPEECH_SPECS
)


def speech(*prompt: int, count: int):
    return lambda: WalkRequest(SPEECH_PROGRAM, SpeechModel(), SpeechRequest(prompt, count))


TWO_PARTITIONS = SubmoduleCase(
    lambda: ModelParts({PRODUCER: Talker(), CONSUMER: Vocoder()}, SPEECH_SPECS),
    [speech(3, 1, 4, count=6), speech(2, 7, count=4), speech(5, count=7)],
    tolerance=1e-6,
)

CASES = {
    "cache reader": CACHE_READER,
    "two partitions": TWO_PARTITIONS,
    "decoder": DECODER,
    "encoder-decoder": ENCODER_DECODER,
    "guided flow": GUIDED_FLOW,
    "recurrent": RECURRENT,
    "stateless": STATELESS,
}
