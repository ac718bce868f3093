"""A real decoder on the real resources gives what the same weights give without a cache."""

from __future__ import annotations

import pytest
import torch

from phalanx.device.operators.torch_operators import TorchOperators
from phalanx.step.resources.sampler import SamplerConfig
from phalanx.step.resources.sampling import RowFilter
from phalanx.testing.token_request import TokenRequest
from phalanx.testing.toy_decoder import HEADS, ToyWeights, rotary_tables, toy_decoder_engine
from tests.step.stepping import Stepping

PROMPTS = {
    "a": (3, 1, 4, 1, 5, 9, 2, 6),
    "b": (27,),
    "c": (2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4),
    "d": (1, 1, 2, 3, 5),
}
GREEDY = SamplerConfig(RowFilter(0.0), seed=0)


def rotated(x: torch.Tensor) -> torch.Tensor:
    cos, sin = (table[:, None] for table in rotary_tables(torch.arange(len(x))))
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def normed(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def dense_logits(weights: ToyWeights, tokens: list[int]) -> torch.Tensor:
    """The logits behind the last token, of all tokens at once."""
    x = weights.embedding[tokens]
    heads, groups = HEADS.num_heads, HEADS.num_kv_heads
    for qkv, output in zip(weights.qkv, weights.output, strict=True):
        split = (normed(x) @ qkv.T).view(len(tokens), heads + 2 * groups, HEADS.head_dim)
        q = rotated(split[:, :heads])
        k = rotated(split[:, heads : heads + groups]).repeat_interleave(heads // groups, 1)
        v = split[:, heads + groups :].repeat_interleave(heads // groups, 1)
        scores = torch.einsum("thd,shd->hts", q, k) / HEADS.head_dim**0.5
        visible = torch.ones(len(tokens), len(tokens)).tril().bool()
        mixed = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        x = x + torch.einsum("hts,shd->thd", mixed, v).flatten(1) @ output.T
    return normed(x)[-1] @ weights.head.T


def dense(prompt: tuple[int, ...], count: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens, and the logits that each was taken from."""
    weights, tokens, rows = ToyWeights(), list(prompt), []
    for _ in range(count):
        rows.append(dense_logits(weights, tokens))
        tokens.append(int(rows[-1].argmax()))
    return tokens[len(prompt) :], torch.stack(rows)


@pytest.fixture(params=[True, False], ids=["batched", "row by row"])
def stepping(request):
    engine = toy_decoder_engine(TorchOperators(), 40, 4, batched=request.param)
    made = Stepping(engine)
    yield made
    made.close()


def start(stepping: Stepping, rid: str, count: int, sampler: SamplerConfig = GREEDY) -> None:
    state = stepping.states[rid] = TokenRequest(PROMPTS[rid], count, sampler=sampler)
    stepping.engine.add_request(rid, state, state.resource_configs())


def logits(stepping: Stepping, rid: str) -> torch.Tensor:
    return torch.tensor([numbers["logits"] for numbers in stepping.states[rid].numbers])


def test_greedy_tokens_are_those_of_a_dense_forward(stepping):
    for rid in PROMPTS:
        start(stepping, rid, 6)
    assert stepping.finish(*PROMPTS) == {}
    for rid, prompt in PROMPTS.items():
        tokens, rows = dense(prompt, 6)
        torch.testing.assert_close(logits(stepping, rid), rows, rtol=1e-5, atol=1e-5)
        assert stepping.states[rid].outputs == tokens


@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
def test_a_prompt_in_chunks_gives_the_same(stepping, chunk):
    for rid in ("a", "c"):
        start(stepping, rid, 4)
    live = {rid: stepping.states[rid] for rid in ("a", "c")}
    while any(len(state.outputs) < 4 for state in live.values()):
        spans = {
            rid: min(chunk, state.num_tokens - state.computed)
            for rid, state in live.items()
            if len(state.outputs) < 4
        }
        assert stepping.step(**spans).failed_requests == {}
    for rid in live:
        tokens, rows = dense(PROMPTS[rid], 4)
        torch.testing.assert_close(logits(stepping, rid), rows, rtol=1e-5, atol=1e-5)
        assert stepping.states[rid].outputs == tokens


def test_prefill_and_decode_share_a_step(stepping):
    start(stepping, "a", 6)
    stepping.step(a=0)
    start(stepping, "b", 5)
    start(stepping, "c", 4)
    stepping.step(a=0, b=0, c=5)
    stepping.step(a=0, b=0, c=0)
    assert stepping.finish("a", "b", "c") == {}
    for rid in ("a", "b", "c"):
        assert stepping.states[rid].outputs == dense(PROMPTS[rid], stepping.states[rid].count)[0]


def test_seeded_draws_are_the_same_alone_and_together(stepping):
    drawn = {
        rid: SamplerConfig(RowFilter(1.2, top_p=0.95), seed) for seed, rid in enumerate("abcd")
    }
    alone = {}
    for rid, sampler in drawn.items():
        start(stepping, rid, 8, sampler)
        assert stepping.finish(rid) == {}
        alone[rid] = stepping.states[rid].outputs
        stepping.engine.remove_request(rid)
    for rid, sampler in drawn.items():
        start(stepping, rid, 8, sampler)
    assert stepping.finish(*drawn) == {}
    assert {rid: stepping.states[rid].outputs for rid in drawn} == alone
    assert len({tuple(tokens) for tokens in alone.values()}) == 4
