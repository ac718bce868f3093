"""The real plugin behind the server: what a client sees is what the engine computed."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from phalanx import Engine, GenerateRequest, LogprobOptions, SamplingParams
from phalanx.engine_config import DeviceConfig, EngineArgs, EngineConfig, RuntimeConfig
from phalanx.models.causal_lm import CausalLMArgs
from phalanx.models.causal_lm.entry import CausalLM
from phalanx.schema.server_config import ServerConfig
from tests.models.conftest import smollm2_dir, tiny_dir  # noqa: F401 - fixtures
from tests.server.conftest import events
from tests.server.running import RunningServer, running
from tests.server.test_control import Streamed, load, until

GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
TALE = "Once upon a time there was a lighthouse at the sea, and"
SHORT = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
PROMPTS = ["The sea", "List three fruits: apple, pear", "北京 and", "x"]


def serving_model(directory: Path, **options: object):
    args = CausalLMArgs(directory, native_operators="off", **options)
    config = EngineConfig(DeviceConfig("cpu", "float32"), RuntimeConfig(num_threads=1))
    return running(
        lambda: Engine(EngineArgs("causal_lm", args, config)),
        CausalLM.serving(args),
        ServerConfig(port=0),
    )


@pytest.fixture(scope="module")
def server(tiny_dir: Path) -> Iterator[RunningServer]:  # noqa: F811
    with serving_model(tiny_dir, pool_tokens=2048, max_batch_size=4) as running_server:
        yield running_server


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("skip", [True, False])
def test_text_decoded_here_is_the_text_decoded_in_the_engine(server, client, prompt, skip):
    sampling = {**GREEDY, "skip_special_tokens": skip}
    answer = client.post("/generate", json={"text": prompt, "sampling_params": sampling}).json()
    request = GenerateRequest(prompt=prompt, sampling=SamplingParams(**sampling))
    expected = server.engine.step(request).completions[0]
    assert answer["output_ids"] == list(expected.token_ids)
    assert answer["text"] == expected.text
    body = {"text": prompt, "sampling_params": sampling, "stream": True}
    assert events(client.post("/generate", json=body))[-1]["text"] == expected.text


def test_logprobs_are_those_of_the_engine(server, client):
    body = {
        "text": PROMPTS[1],
        "sampling_params": GREEDY,
        "return_logprob": True,
        "logprob_start_len": 2,
        "top_logprobs_num": 3,
        "token_ids_logprob": [5, 6],
    }
    meta = client.post("/generate", json=body).json()["meta_info"]
    output = server.engine.step(
        GenerateRequest(
            prompt=PROMPTS[1],
            sampling=SamplingParams(**GREEDY),
            logprobs=LogprobOptions(prompt_start=2, top_k=3, token_ids=(5, 6)),
        )
    )
    prompt, answer = output.prompt_logprobs, output.completions[0].logprobs
    values = [entry[0] for entry in meta["input_token_logprobs"]]
    assert values[0] is None
    assert values[1:] == pytest.approx(prompt.values[1:])
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"] - 2
    assert [entry[0] for entry in meta["output_token_logprobs"]] == pytest.approx(answer.values)
    assert [[pair[1] for pair in row] for row in meta["output_top_logprobs"]] == [
        [token for _, token in row] for row in answer.top
    ]
    assert [pair[1] for pair in meta["output_token_ids_logprobs"][0]] == [5, 6]


def test_scoring_only(client):
    body = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = client.post("/generate", json=body).json()
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert answer["output_ids"] == []
    assert answer["meta_info"]["input_token_logprobs"][0] == [None, 5, None]


def test_batch_and_concurrent_requests_answer_as_alone(server, client):
    alone = [
        client.post("/generate", json={"text": one, "sampling_params": GREEDY}).json()["output_ids"]
        for one in PROMPTS
    ]
    batch = client.post("/generate", json={"text": PROMPTS, "sampling_params": GREEDY}).json()
    assert [one["output_ids"] for one in batch] == alone

    def ask(prompt: str) -> list[int]:
        with server.client() as own:
            body = {"text": prompt, "sampling_params": GREEDY, "stream": True}
            return events(own.post("/generate", json=body))[-1]["output_ids"]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, PROMPTS * 3)) == alone * 3


def test_stop_string_and_seed(client):
    sampling = {"temperature": 1.0, "sampling_seed": 11, "max_new_tokens": 24, "ignore_eos": True}
    body = {"text": "The sea", "sampling_params": sampling}
    free = client.post("/generate", json=body).json()["text"]
    assert client.post("/generate", json=body).json()["text"] == free
    stop = next(character for character in free[4:] if character not in "\ufffd")
    stopped = client.post(
        "/generate", json={"text": "The sea", "sampling_params": {**sampling, "stop": stop}}
    ).json()
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stopped["text"] == free[: free.index(stop)]


def test_several_completions_of_one_prompt(client):
    sampling = {"temperature": 1.0, "sampling_seed": 5, "n": 3, "max_new_tokens": 8}
    body = {"text": "The sea", "sampling_params": sampling}
    answers = client.post("/generate", json=body).json()
    assert len(answers) == 3
    chunks = events(client.post("/generate", json={**body, "stream": True}))
    texts = {chunk["index"]: chunk["text"] for chunk in chunks}
    assert [texts[at] for at in range(3)] == [answer["text"] for answer in answers]


def test_abort_while_decoding(server, client):
    sampling = {"ignore_eos": True, "max_new_tokens": 250}
    streams = [
        Streamed(server, text="x", rid=f"ab-{at}", sampling_params=sampling) for at in range(3)
    ]
    client.post("/abort_request", json={"rid": "ab-"})
    for stream in streams:
        assert stream.rest().endswith(b"data: [DONE]\n\n")
        stream.close()
    until(lambda: load(client)["num_total_reqs"] == 0)
    assert client.get("/flush_cache").status_code == 200


def test_prompt_beyond_the_context(client):
    response = client.post("/generate", json={"input_ids": [5] * 300})
    assert response.status_code == 400
    assert "256" in response.json()["error"]["message"]


def test_json_schema(server):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        answer = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": "x"}],
            temperature=0,
            response_format={
                "type": "json_schema",
                "json_schema": {
                    "name": "a",
                    "schema": {**schema, "additionalProperties": False},
                },
            },
            max_tokens=200,
            logit_bias={"13": -100},
        )
    assert answer.choices[0].message.content.lstrip().startswith("{")


def test_smollm2_answers_a_chat(smollm2_dir: Path):  # noqa: F811
    with serving_model(smollm2_dir, pool_tokens=2048) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            ask = {
                "model": "smollm2-135m",
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
                "temperature": 0,
            }
            answer = client.chat.completions.create(**ask, extra_body={"return_token_ids": True})
            choice = answer.choices[0]
            assert choice.message.content == "The capital of France is Paris."
            assert choice.response_token_ids == [504, 3575, 282, 4649, 314, 7042, 30, 2]
            assert answer.usage.prompt_tokens == 37
            chunks = client.chat.completions.create(**ask, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            assert text == choice.message.content


@pytest.fixture
def known(client: httpx.Client) -> int:
    """Tokens of the prompt that are known when it comes again."""
    assert client.post("/flush_cache").status_code == 200
    meta = generate(client)["meta_info"]
    assert meta["cached_tokens"] == 0
    cached = (meta["prompt_tokens"] - 1) // 16 * 16
    assert cached > 0
    return cached


def generate(client: httpx.Client, **options: object) -> dict:
    body = {"text": TALE, "sampling_params": SHORT, **options}
    return client.post("/generate", json=body).json()


def metric(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


def test_generate_tells_what_was_cached(client, known):
    assert generate(client)["meta_info"]["cached_tokens"] == known
    body = {"text": TALE, "sampling_params": SHORT, "stream": True}
    meta = events(client.post("/generate", json=body))[-1]["meta_info"]
    assert meta["cached_tokens"] == known
    answers = generate(client, text=[TALE, "x"])
    assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [known, 0]


def test_completions_tell_what_was_cached(client, known):
    body = {
        "model": client.get("/v1/models").json()["data"][0]["id"],
        "prompt": TALE,
        "max_tokens": 4,
        "temperature": 0,
    }
    usage = client.post("/v1/completions", json=body).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": known}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(client.post("/v1/completions", json={**body, **options}))
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": known}


def test_chat_tells_what_was_cached(client):
    body = {
        "model": client.get("/v1/models").json()["data"][0]["id"],
        "messages": [{"role": "user", "content": TALE}],
        "max_tokens": 4,
        "temperature": 0,
    }
    usages = [client.post("/v1/chat/completions", json=body).json()["usage"] for _ in range(2)]
    assert usages[1]["prompt_tokens_details"]["cached_tokens"] >= 16
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(client.post("/v1/chat/completions", json={**body, **options}))
    assert chunks[-1]["usage"] == usages[1]


def test_metrics_count_what_was_cached(client, known):
    before = metric(client, "phalanx_cached_prompt_tokens_total")
    computed = metric(client, "phalanx_computed_prompt_tokens_total")
    meta = generate(client)["meta_info"]
    tail = meta["prompt_tokens"] - known
    assert metric(client, "phalanx_cached_prompt_tokens_total") == before + known
    assert metric(client, "phalanx_computed_prompt_tokens_total") == computed + tail
    assert metric(client, "phalanx_kv_pool_cached_tokens") >= known
    assert metric(client, "phalanx_kv_pool_used_tokens") == 0
