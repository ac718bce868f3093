"""Updates while many rollouts run: each token is its own version's, and the answer says which."""

import itertools

import pytest

from tests.server.rl.asking import PROMPT, post
from tests.server.rl.models import serving
from tests.server.test_control import until, whole

NUM_TOKENS = 80


@pytest.fixture(scope="module")
def references(first_dir, second_dir):
    """A server of each version, to score what was generated."""
    with (
        serving(first_dir) as first,
        serving(second_dir) as second,
        first.client() as one,
        second.client() as other,
    ):
        yield {"a": one, "b": other}


def likeliest(client, tokens: list[int], start: int) -> list[int]:
    """What greedy decoding gives at each position from `start` on, after the tokens before it."""
    body = {
        "input_ids": tokens,
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": start - 1,
        "top_logprobs_num": 1,
    }
    meta = client.post("/generate", json=body).json()["meta_info"]
    return [row[0][1] for row in meta["input_top_logprobs"][1:]]


def check(result: dict, prompt: list[int], references: dict) -> int:
    """Every token is the likeliest of the weights that it is said to be of; how many spans."""
    tokens, spans = result["output_ids"], result["meta_info"]["weight_versions"]
    assert len(tokens) == NUM_TOKENS == sum(count for _, count in spans)
    assert result["meta_info"]["weight_version"] == spans[-1][0]
    at = 0
    for version, count in spans:
        own = likeliest(references[version[0]], prompt + tokens, len(prompt) + at)
        assert own[:count] == tokens[at : at + count], (version, at, spans)
        at += count
    return len(spans)


@pytest.mark.parametrize(
    ("num_requests", "num_updates"), [(4, 2), pytest.param(32, 10, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_no_answer_mixes_versions_without_saying_so(
    server, client, pool, first_dir, second_dir, references, mode, num_requests, num_updates
):
    directories = {"a": first_dir, "b": second_dir}
    body = {"model_path": str(first_dir), "weight_version": "a0"}
    post(client, "/update_weights_from_disk", body)
    prompts = [[*PROMPT, 10 + at] for at in range(num_requests)]
    sampling = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    asked = [whole(pool, server, input_ids=one, sampling_params=sampling) for one in prompts]
    for number, letter in zip(range(1, num_updates + 1), itertools.cycle("ba")):
        before = steps(client)
        until(lambda: steps(client) > before + 4 or all(one.done() for one in asked))
        post(client, "/pause_generation", {"mode": mode})
        body = {"model_path": str(directories[letter]), "weight_version": f"{letter}{number}"}
        post(client, "/update_weights_from_disk", body)
        post(client, "/continue_generation")
    num_spans = [
        check(one.result(), prompt, references) for one, prompt in zip(asked, prompts, strict=True)
    ]
    assert max(num_spans) > 1


def steps(client) -> int:
    return client.get("/server_info").json()["internal_states"][0]["loop"]["num_steps"]
