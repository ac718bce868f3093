"""A decoder with real attention and a real sampler gives the same tokens however its requests meet."""

from __future__ import annotations

import pytest
import torch

from phalanx.device.operators.torch_operators import TorchOperators
from phalanx.step.resources.penalties import Penalties
from phalanx.step.resources.sampler import SamplerConfig
from phalanx.step.resources.sampling import RowFilter
from phalanx.testing.toy_decoder import VOCAB_SIZE, toy_decoder_engine
from tests.loop.ledger import Bench, prompt_of

SAMPLERS = [
    SamplerConfig(RowFilter(0.0), seed=0),
    SamplerConfig(RowFilter(1.0), seed=11),
    SamplerConfig(RowFilter(0.9, top_k=8, top_p=0.9), seed=12),
    SamplerConfig(RowFilter(1.1), 13, Penalties(frequency=0.4, presence=0.2)),
    SamplerConfig(RowFilter(0.0), 14, Penalties(repetition=1.3)),
    SamplerConfig(RowFilter(1.0, min_p=0.05), 15, logit_bias=((7, 2.0), (9, -100))),
    SamplerConfig(RowFilter(0.8), 16, forbidden=(1, 2, 3, 5, 8), forbidden_until=4),
    SamplerConfig(RowFilter(1.3, top_p=0.8), seed=11),
]
NAMES = [f"r{index}" for index in range(len(SAMPLERS))]


def start(bench: Bench, index: int) -> None:
    length = 1 + (index * 5) % 17
    prompt = tuple(token % VOCAB_SIZE for token in prompt_of(length, index))
    bench.start(NAMES[index], length, 6 + index % 4, prompt=prompt, sampler=SAMPLERS[index])


def logits(bench: Bench, rid: str) -> torch.Tensor:
    return torch.tensor([numbers["logits"] for numbers in bench.states[rid].numbers])


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[tuple[int, ...], torch.Tensor]]:
    """Each request's tokens and logits when nobody else is there."""
    found = {}
    for index, rid in enumerate(NAMES):
        bench = Bench(toy_decoder_engine(TorchOperators(), 40, 4))
        start(bench, index)
        bench.finish()
        found[rid] = (bench.output(rid), logits(bench, rid))
    return found


@pytest.mark.parametrize(
    ("pages", "tokens", "running", "batched"),
    [
        (200, 512, 8, True),
        (200, 512, 8, False),
        (200, 5, 8, True),
        (200, 1, 3, True),
        (8, 16, 8, True),
        (7, 3, 4, True),
        (7, 512, 8, False),
    ],
)
def test_a_request_gives_what_it_gives_alone(alone, pages, tokens, running, batched):
    engine = toy_decoder_engine(TorchOperators(), pages, 4, batched=batched)
    bench = Bench(engine, tokens=tokens, running=running)
    for index in range(len(NAMES)):
        start(bench, index)
        if index % 3 == 2:
            bench.tick()
    bench.finish()
    for rid, (expected, rows) in alone.items():
        assert bench.output(rid) == expected
        torch.testing.assert_close(logits(bench, rid), rows, rtol=1e-5, atol=1e-5)
    assert (bench.loop.num_push_backs > 0) is (pages < 10)


def test_settings_make_a_difference(alone):
    assert len({tokens for tokens, _ in alone.values()}) == len(NAMES)
    assert not {1, 2, 3, 5, 8} & set(alone["r6"][0][:4])
    assert 9 not in alone["r5"][0]
