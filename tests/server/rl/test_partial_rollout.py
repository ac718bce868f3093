"""Rollouts that an update interrupts: their tokens are kept, and say which weights made them."""

import json

import pytest

from tests.server.rl.asking import (
    ENDLESS,
    GREEDY,
    PROMPT,
    abort_all,
    answer,
    num_generated,
    post,
)
from tests.server.rl.models import serving
from tests.server.test_control import Streamed, load, until

DISK = "/update_weights_from_disk"
ASK = [{"role": "user", "content": "Hello"}]


def last_chunk(stream: Streamed) -> dict:
    """What the stream's last event says; its stream is read to the end."""
    lines = stream.rest().split(b"\n\n")
    return json.loads(lines[-3].removeprefix(b"data: "))


def update(client, directory, told: str) -> None:
    post(client, DISK, {"model_path": str(directory), "weight_version": told})


def go_on_for_a_while(client) -> None:
    """Some tokens are made, then what runs is ended."""
    before = num_generated(client)
    post(client, "/continue_generation")
    until(lambda: num_generated(client) > before + 20)
    abort_all(client)


@pytest.fixture(scope="module")
def second_client(second_dir):
    with serving(second_dir) as server, server.client() as client:
        yield client


def test_an_aborted_rollout_goes_on_with_its_tokens_after_an_update(
    server, client, second_dir, second_client
):
    stream = Streamed(server, input_ids=PROMPT, sampling_params=ENDLESS, return_logprob=True)
    post(client, "/pause_generation", {"mode": "abort"})
    kept = last_chunk(stream)
    stream.close()
    meta = kept["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    tokens = [one[1] for one in meta["output_token_logprobs"]]
    assert tokens == kept["output_ids"] and 0 < len(tokens) < ENDLESS["max_new_tokens"]
    assert meta["weight_versions"] == [["default", len(tokens)]]
    update(client, second_dir, "2")
    post(client, "/continue_generation")
    rest = answer(client, input_ids=PROMPT + tokens)
    assert rest["meta_info"]["weight_versions"] == [["2", 8]]
    assert rest["meta_info"]["prompt_tokens"] == len(PROMPT) + len(tokens)
    assert rest["output_ids"] == answer(second_client, input_ids=PROMPT + tokens)["output_ids"]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_rollout_that_stood_still_names_both_versions(
    server, client, second_dir, second_client, mode
):
    stream = Streamed(server, input_ids=PROMPT, sampling_params=ENDLESS)
    post(client, "/pause_generation", {"mode": mode})
    body = {"model_path": str(second_dir), "weight_version": "2"}
    assert post(client, DISK, body).json()["num_paused_requests"] == 1
    go_on_for_a_while(client)
    last = last_chunk(stream)
    stream.close()
    tokens = last["output_ids"]
    (first, before), (second, after) = last["meta_info"]["weight_versions"]
    assert (first, second, before + after) == ("default", "2", len(tokens))
    assert last["meta_info"]["weight_version"] == "2"
    # What followed the update is what the new weights say after all of it, computed anew.
    whole = PROMPT + tokens[:before]
    sampling = {**GREEDY, "max_new_tokens": min(after, 8)}
    expected = answer(second_client, input_ids=whole, sampling_params=sampling)["output_ids"]
    assert tokens[before : before + len(expected)] == expected


def posted(server, path: str, body: dict):
    with server.client() as client:
        return client.post(path, json=body)


def test_openai_answers_name_both_versions_too(server, client, pool, second_dir):
    """In the choice, where no meta_info was asked for."""
    limits = {"max_tokens": 3500, "ignore_eos": True}
    calls = [
        (path, {**asked, **limits, "stream": stream})
        for stream in (False, True)
        for path, asked in (
            ("/v1/completions", {"prompt": "Hello"}),
            ("/v1/chat/completions", {"messages": ASK}),
        )
    ]
    answers = [pool.submit(posted, server, *call) for call in calls]
    until(lambda: load(client)["num_running_reqs"] == len(calls))
    post(client, "/pause_generation", {"mode": "in_place"})
    update(client, second_dir, "2")
    go_on_for_a_while(client)
    for (_, body), pending in zip(calls, answers, strict=True):
        response = pending.result()
        if body["stream"]:
            events = [json.loads(one[6:]) for one in response.text.split("\n\n")[:-2]]
            spans = events[-1]["choices"][0]["weight_versions"]
        else:
            spans = response.json()["choices"][0]["weight_versions"]
        assert [version for version, _ in spans] == ["default", "2"]
        # A stream's header goes out with its first token.
        assert response.headers["x-weight-version"] == ("default" if body["stream"] else "2")


def test_every_answer_names_its_version(client, second_dir):
    for told in ("default", "step 2/b", "čtyři"):
        if told != "default":
            update(client, second_dir, told)
        shown = told if told.isascii() else "'\\u010dty\\u0159i'"
        response = client.post("/generate", json={"input_ids": PROMPT})
        assert response.headers["x-weight-version"] == shown
        assert response.json()["meta_info"]["weight_version"] == told
        for path, body in (
            ("/v1/chat/completions", {"messages": ASK, "max_tokens": 2}),
            ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
            ("/generate/", {"prompts": ["a"]}),
        ):
            response = client.post(path, json=body)
            assert response.headers["x-weight-version"] == shown
            assert "weight_versions" not in response.text
        body = {"messages": ASK, "max_tokens": 2, "return_meta_info": True}
        choice = client.post("/v1/chat/completions", json=body).json()["choices"][0]
        assert choice["meta_info"]["weight_version"] == told
