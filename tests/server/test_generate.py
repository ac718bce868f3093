"""`POST /generate` as SGLang answers it."""

import pytest

from tests.server.conftest import events

TEXT = "The sea is wide 北京 😀."


def generate(client, **body):
    return client.post("/generate", json=body)


def test_single_prompt(client, tokenizer):
    answer = generate(client, text=TEXT).json()
    ids = tokenizer.encode(TEXT)
    assert answer["text"] == TEXT
    assert answer["output_ids"] == [*ids, 2]
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": 2}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(ids), len(ids) + 1)
    assert meta["weight_version"] == "default"
    assert meta["cached_tokens"] == meta["num_retractions"] == meta["reasoning_tokens"] == 0
    again = generate(client, text=TEXT, routed_dp_rank=meta["dp_rank"]).json()["meta_info"]
    (load,) = client.get("/v1/loads").json()["loads"]
    assert meta["dp_rank"] == again["dp_rank"] == load["dp_rank"] == 0
    assert meta["e2e_latency"] >= 0
    assert set(answer) == {"text", "output_ids", "meta_info"}


def test_put_is_answered_too(client):
    assert client.put("/generate", json={"text": "a"}).json()["text"] == "a"


def test_input_ids_rid_and_length(client):
    answer = generate(
        client, input_ids=[70, 71, 72], rid="mine", sampling_params={"max_new_tokens": 2}
    ).json()
    assert answer["output_ids"] == [70, 71]
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
    assert answer["meta_info"]["id"] == "mine"


def test_scoring_a_prompt_generates_nothing(client):
    answer = generate(
        client,
        input_ids=[70, 71, 72],
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=0,
        token_ids_logprob=[5],
    ).json()
    meta = answer["meta_info"]
    assert (answer["text"], answer["output_ids"]) == ("", [])
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert meta["input_token_logprobs"] == [[None, 70, None], [-0.75, 71, None], [0.0, 72, None]]
    assert meta["input_token_ids_logprobs"] == [None, [[-1.625, 5, None]], [[-1.625, 5, None]]]
    assert meta["output_token_logprobs"] == []


def test_logprobs_have_the_length_of_prompt_minus_start(client):
    answer = generate(
        client,
        input_ids=[70, 71, 72, 73],
        sampling_params={"max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=3,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
        return_prompt_token_ids=True,
    ).json()
    meta = answer["meta_info"]
    assert [entry[:2] for entry in meta["input_token_logprobs"]] == [[None, 73]], (
        "the first is null"
    )
    assert isinstance(meta["input_token_logprobs"][0][2], str)
    assert [entry[:2] for entry in meta["output_top_logprobs"][0]] == [[-0.25, 3], [-0.75, 4]]
    assert meta["output_token_logprobs_length"] == 1
    assert answer["prompt_token_ids"] == [70, 71, 72, 73]


def test_without_a_start_only_output_logprobs(client):
    meta = generate(client, input_ids=[70, 71], return_logprob=True).json()["meta_info"]
    assert meta["input_token_logprobs"] == []
    assert [entry[1] for entry in meta["output_token_logprobs"]] == [70, 71, 2]
    assert "input_top_logprobs" not in meta


def test_batch_answers_in_input_order(client):
    answers = generate(
        client,
        text=["long " * 20, "b"],
        rid=["x", "y"],
        sampling_params=[{"max_new_tokens": 100}, {"max_new_tokens": 1}],
    ).json()
    assert [answer["meta_info"]["id"] for answer in answers] == ["x", "y"]
    assert answers[0]["text"] == "long " * 20
    assert answers[1]["text"] == "b"


def test_n_completions_are_a_list(client):
    answers = generate(client, text="ab", rid="r", sampling_params={"n": 3}).json()
    assert [answer["meta_info"]["id"] for answer in answers] == ["r_0", "r_1", "r_2"]
    assert {answer["text"] for answer in answers} == {"ab"}


def test_stop_string_is_trimmed_and_named(client):
    answer = generate(client, text="one END two", sampling_params={"stop": "END"}).json()
    assert answer["text"] == "one "
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "END"}
    kept = generate(
        client, text="one END two", sampling_params={"stop": ["END"], "no_stop_trim": True}
    ).json()
    assert kept["text"] == "one END"


def test_stop_regex(client):
    answer = generate(client, text="go 12 on", sampling_params={"stop_regex": r"\d\d"}).json()
    assert answer["text"] == "go 12"


def test_stop_token_is_not_text_unless_wanted(client, tokenizer):
    token = tokenizer.encode("Q")[0]
    body = {"text": "aQb", "sampling_params": {"stop_token_ids": [token]}}
    answer = client.post("/generate", json=body).json()
    assert (answer["text"], answer["output_ids"][-1]) == ("a", token)
    body["sampling_params"]["no_stop_trim"] = True
    assert client.post("/generate", json=body).json()["text"] == "aQ"


def test_special_tokens_are_shown_when_asked_for(client):
    sampling = {"skip_special_tokens": False, "no_stop_trim": True}
    assert generate(client, text="a", sampling_params=sampling).json()["text"] == "a<|im_end|>"


def test_stream_is_cumulative(client, tokenizer):
    response = generate(client, text=TEXT, stream=True, return_logprob=True, logprob_start_len=0)
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response)
    ids = tokenizer.encode(TEXT)
    # Deltas that wait for the reader are merged, so there are as many chunks as it was fast.
    lengths = [len(chunk["output_ids"]) for chunk in chunks]
    assert lengths == sorted(set(lengths))
    for before, after in zip(chunks, chunks[1:], strict=False):
        assert after["text"].startswith(before["text"])
        assert "\ufffd" not in after["text"]
    assert all(chunk["meta_info"]["finish_reason"] is None for chunk in chunks[:-1])
    assert all(len(chunk["meta_info"]["input_token_logprobs"]) == len(ids) for chunk in chunks)
    last = chunks[-1]
    assert last["text"] == TEXT
    assert last["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
    assert len(last["meta_info"]["output_token_logprobs"]) == len(ids) + 1


def test_stream_ends_like_the_whole_answer(client):
    body = {"text": TEXT, "return_logprob": True, "top_logprobs_num": 1, "rid": "same"}
    whole = client.post("/generate", json=body).json()
    last = events(client.post("/generate", json={**body, "stream": True}))[-1]
    for answer in (whole, last):
        del answer["meta_info"]["e2e_latency"]
    assert last == whole


def test_incremental_stream(serve, tokenizer):
    with serve(server={"incremental_streaming_output": True}) as server, server.client() as client:
        chunks = events(generate(client, text=TEXT, stream=True, return_logprob=True))
    ids = tokenizer.encode(TEXT)
    assert "".join(chunk["text"] for chunk in chunks) == TEXT
    assert [one for chunk in chunks for one in chunk["output_ids"]] == [*ids, 2]
    lengths = [chunk["meta_info"]["output_token_logprobs_length"] for chunk in chunks]
    assert lengths[-1] == len(ids) + 1
    assert lengths == sorted(lengths)


def test_batch_stream_carries_the_index(client):
    chunks = events(generate(client, text=["abc", "de"], stream=True, sampling_params={"n": 2}))
    texts = {chunk["index"]: chunk["text"] for chunk in chunks}
    assert texts == {0: "abc", 1: "abc", 2: "de", 3: "de"}
    ended = [chunk["index"] for chunk in chunks if chunk["meta_info"]["finish_reason"]]
    assert sorted(ended) == [0, 1, 2, 3]


def test_stop_string_in_a_stream_is_never_shown(client):
    chunks = events(
        generate(client, text="one END two", stream=True, sampling_params={"stop": ["END"]})
    )
    assert all("E" not in chunk["text"] for chunk in chunks)
    assert chunks[-1]["text"] == "one "


def test_defaults_that_the_router_adds_are_accepted(client):
    body = {
        "text": "hi",
        "model": None,
        "return_text_in_logprobs": False,
        "stream": False,
        "log_metrics": True,
        "return_hidden_states": False,
        "background": False,
        "no_logs": False,
        "return_bytes": False,
        "return_entropy": False,
        "image_data": None,
        "session_params": None,
    }
    assert client.post("/generate", json=body).json()["text"] == "hi"


@pytest.mark.parametrize("seed, status", [(666, 500)])
def test_failure_before_the_first_token_is_a_status(client, seed, status):
    for stream in (False, True):
        response = generate(
            client, text="a", stream=stream, sampling_params={"sampling_seed": seed}
        )
        assert response.status_code == status
        assert "scripted failure" in response.json()["error"]["message"]


def test_failure_after_it_is_an_event(client):
    response = generate(client, text="abcdef", stream=True, sampling_params={"sampling_seed": 667})
    assert response.status_code == 200
    error = events(response)[-1]["error"]
    assert (error["code"], error["retryable"]) == (500, False)
    assert "scripted failure" in error["message"]
