"""Log-probabilities over HTTP against a plain torch forward of the same checkpoint."""

import pytest
import torch

from tests.server.rl.asking import PROMPT, answer, post
from tests.server.rl.models import serving

PREFIX = [*PROMPT, 9, 10, 11]
CLOSE = 1e-4


@pytest.fixture(scope="module")
def client(first_dir):
    with serving(first_dir) as server, server.client() as http:
        yield http


@pytest.fixture(scope="module")
def forward(first_dir):
    """Log-probabilities of every token after each of the given ones."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(first_dir, dtype=torch.float32)

    @torch.no_grad()
    def logprobs(tokens: list[int]) -> torch.Tensor:
        return model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)

    return logprobs


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_complaint_slime_714_a_rollouts_logprobs_are_the_models_own(client, forward, temperature):
    sampling = {
        "temperature": temperature,
        "max_new_tokens": 64,
        "ignore_eos": True,
        "sampling_seed": 1,
    }
    result = answer(client, input_ids=PREFIX, sampling_params=sampling, return_logprob=True)
    tokens = result["output_ids"]
    scores = forward(PREFIX + tokens)[len(PREFIX) - 1 : -1]
    expected = scores[torch.arange(len(tokens)), tokens]
    values = [entry[0] for entry in result["meta_info"]["output_token_logprobs"]]
    assert [entry[1] for entry in result["meta_info"]["output_token_logprobs"]] == tokens
    torch.testing.assert_close(torch.tensor(values), expected, atol=CLOSE, rtol=0)


def test_complaint_slime_714_a_teachers_scores_are_the_models_own(client, forward):
    tokens = [*PREFIX, 40, 41, 42]
    body = {
        "input_ids": tokens,
        "sampling_params": {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": len(PREFIX) - 1,
        "top_logprobs_num": 5,
        "token_ids_logprob": [50, 51],
    }
    meta = post(client, "/generate", body).json()["meta_info"]
    scores = forward(tokens)
    for at, position in enumerate(range(len(PREFIX), len(tokens)), start=1):
        row = scores[position - 1]
        value, token, _ = meta["input_token_logprobs"][at]
        assert (token, abs(value - row[token].item()) < CLOSE) == (tokens[position], True)
        best = row.topk(5)
        for (value, token, _), expected in zip(
            meta["input_top_logprobs"][at], best.indices.tolist(), strict=True
        ):
            assert (token, abs(value - row[token].item()) < CLOSE) == (expected, True)
        for value, token, _ in meta["input_token_ids_logprobs"][at]:
            assert abs(value - row[token].item()) < CLOSE


def test_prompt_logprobs_of_vllms_dialect_are_the_same(client, forward):
    body = {"prompt": PREFIX, "max_tokens": 1, "prompt_logprobs": 3}
    rows = post(client, "/v1/completions", body).json()["choices"][0]["prompt_logprobs"]
    scores = forward(PREFIX)
    for position in range(1, len(PREFIX)):
        for token, entry in rows[position].items():
            expected = scores[position - 1][int(token)].item()
            assert abs(entry["logprob"] - expected) < CLOSE
        best = sorted(rows[position], key=lambda one: rows[position][one]["rank"])[:3]
        assert [int(one) for one in best] == scores[position - 1].topk(3).indices.tolist()
