"""The small models and requests of every kind for each."""

from __future__ import annotations

from phalanx.step.resources.penalties import Penalties
from phalanx.step.resources.sampler import SamplerConfig
from phalanx.step.resources.sampling import RowFilter
from phalanx.testing import SubmoduleCase
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
from phalanx.testing.token_request import TokenRequest

SAMPLERS = (
    SamplerConfig(RowFilter(0.0), seed=0),
    SamplerConfig(RowFilter(1.0), seed=1),
    SamplerConfig(RowFilter(0.9, top_k=8), 2, Penalties(repetition=1.3)),
)

DECODER = SubmoduleCase(
    lambda: decoder_parts(60),
    [
        lambda: TokenRequest((3, 1, 4, 1, 5), 4, sampler=SAMPLERS[0]),
        lambda: TokenRequest((27,), 5, sampler=SAMPLERS[1]),
        lambda: TokenRequest((2, 7, 1, 8, 2, 8, 1, 8, 2), 3, sampler=SAMPLERS[2]),
    ],
)
ENCODER_DECODER = SubmoduleCase(
    lambda: encoder_decoder_parts(40),
    [
        lambda: TranslateRequest((3, 1, 4, 1, 5), 4),
        lambda: TranslateRequest((27,), 3),
        lambda: TranslateRequest((), 3),
        lambda: TranslateRequest((2, 7, 1, 8, 2, 8), 5),
    ],
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
        lambda: TokenRequest((3, 1, 4, 1, 5), 4, place=RECURRENT_PLACE),
        lambda: TokenRequest((27,), 3, place=RECURRENT_PLACE),
        lambda: TokenRequest((2, 7, 1, 8, 2, 8), 5, place=RECURRENT_PLACE),
    ],
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

CASES = {
    "decoder": DECODER,
    "encoder-decoder": ENCODER_DECODER,
    "guided flow": GUIDED_FLOW,
    "recurrent": RECURRENT,
    "stateless": STATELESS,
}
