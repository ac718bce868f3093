"""A prefill server and a decode server answer together what one server answers alone."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from phalanx import Engine
from phalanx.engine_config import DeviceConfig, EngineArgs, EngineConfig, RuntimeConfig
from phalanx.models.causal_lm import CausalLMArgs
from phalanx.models.causal_lm.entry import CausalLM
from phalanx.schema.server_config import ServerConfig
from tests.models.conftest import tiny_dir  # noqa: F401 - a fixture
from tests.server.conftest import events
from tests.server.running import RunningServer, running
from tests.server.test_control import until

GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
PROMPT = "The sea is wide, and the ships are few"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def serving(directory: Path, role: str = "both", **options) -> Iterator[RunningServer]:
    server = options.pop("server", {})
    args = CausalLMArgs(directory, native_operators="off", pool_tokens=1024, **options)
    config = EngineConfig(DeviceConfig("cpu", "float32"), RuntimeConfig(num_threads=1))
    with running(
        lambda: Engine(EngineArgs("causal_lm", args, config)),
        CausalLM.serving(args),
        ServerConfig(port=0, role=role, access_log=False, **server),
    ) as one:
        yield one


@dataclass
class Pair:
    """Sends each request to both servers, as a router does."""

    prefill: RunningServer
    decode: RunningServer
    bootstrap_port: int
    pool: ThreadPoolExecutor
    rooms: int = 0

    def paired(self, body: dict, count: int | None = None) -> dict:
        """`body` with the fields of a router; lists of `count` where that is given."""
        first, self.rooms = self.rooms, self.rooms + (count or 1)
        rooms = list(range(first, self.rooms))
        fields = {"host": "127.0.0.1", "port": self.bootstrap_port}
        given = {
            f"bootstrap_{name}": value if count is None else [value] * count
            for name, value in fields.items()
        }
        return {**body, **given, "bootstrap_room": rooms[0] if count is None else rooms}

    def post(
        self, path: str, body: dict, count: int | None = None
    ) -> tuple[httpx.Response, httpx.Response]:
        """The answers of prefill and decode."""
        both = self.paired(body, count)
        pending = [self.pool.submit(post, one, path, both) for one in (self.prefill, self.decode)]
        return pending[0].result(), pending[1].result()

    def is_at_rest(self) -> bool:
        return all(used_tokens(one) == 0 for one in (self.prefill, self.decode))


def post(server: RunningServer, path: str, body: dict) -> httpx.Response:
    with server.client() as client:
        return client.post(path, json=body)


def used_tokens(server: RunningServer) -> int:
    loop = server.engine.statistics().loop
    assert loop is not None
    return loop.pool_used_tokens


@pytest.fixture(scope="module")
def alone(tiny_dir: Path) -> Iterator[httpx.Client]:  # noqa: F811
    with serving(tiny_dir) as one, one.client() as client:
        yield client


@pytest.fixture(scope="module", params=["shm", pytest.param("tcp", marks=pytest.mark.long)])
def pair(request, tiny_dir: Path) -> Iterator[Pair]:  # noqa: F811
    port = free_port()
    with ExitStack() as stack:
        prefill = stack.enter_context(
            serving(
                tiny_dir,
                "prefill",
                transfer=request.param,
                server={"bootstrap_port": port, "handoff_timeout_s": 20},
            )
        )
        decode = stack.enter_context(serving(tiny_dir, "decode", server={"handoff_timeout_s": 20}))
        pool = stack.enter_context(ThreadPoolExecutor(8))
        yield Pair(prefill, decode, port, pool)


def agreed(pair: Pair, path: str, body: dict, count: int | None = None) -> dict:
    """The decode server's answer, where both succeed and nothing is left on either."""
    first, second = pair.post(path, body, count)
    assert (first.status_code, second.status_code) == (200, 200), (first.text, second.text)
    until(pair.is_at_rest)
    return second.json()


SAMPLED = {
    "temperature": 1.0,
    "max_new_tokens": 16,
    "sampling_seed": 7,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.2,
    "ignore_eos": True,
}
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "grammar": {**SAMPLED, "regex": "[a-z]{4,8} [0-9]{3}", "ignore_eos": False},
    "one token": {**GREEDY, "max_new_tokens": 1},
    "no token": {**GREEDY, "max_new_tokens": 0},
    "stop string": {**SAMPLED, "stop": ["e", "a", " "]},
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=list(SAMPLINGS))
def test_the_answer_is_that_of_one_server(pair: Pair, alone: httpx.Client, sampling: dict):
    body = {"text": PROMPT, "sampling_params": sampling, "return_logprob": True}
    expected = alone.post("/generate", json=body).json()
    answer = agreed(pair, "/generate", body)
    for field in ("text", "output_ids"):
        assert answer[field] == expected[field]
    for field in ("output_token_logprobs", "finish_reason", "prompt_tokens"):
        assert answer["meta_info"][field] == expected["meta_info"][field]


def test_the_prompts_logprobs_come_from_the_prefill_server(pair: Pair, alone: httpx.Client):
    body = {
        "text": PROMPT,
        "sampling_params": GREEDY,
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    expected = alone.post("/generate", json=body).json()["meta_info"]
    first, second = pair.post("/generate", body)
    assert first.json()["meta_info"]["input_token_logprobs"] == expected["input_token_logprobs"]
    assert second.json()["meta_info"]["input_token_logprobs"] == []
    until(pair.is_at_rest)


def test_a_stream(pair: Pair, alone: httpx.Client):
    body = {"text": PROMPT, "sampling_params": GREEDY, "stream": True}
    expected = events(alone.post("/generate", json=body))[-1]
    first, second = pair.post("/generate", body)
    assert events(first)[-1]["output_ids"] == expected["output_ids"][:1]
    assert events(second)[-1]["output_ids"] == expected["output_ids"]
    until(pair.is_at_rest)


@pytest.mark.parametrize("stream", [False, True])
def test_a_batch_has_a_room_for_each_prompt(pair: Pair, alone: httpx.Client, stream: bool):
    prompts = [PROMPT, "Short", "Another one of middling length"]
    expected = [
        alone.post("/generate", json={"text": one, "sampling_params": GREEDY}).json()["output_ids"]
        for one in prompts
    ]
    body = {"text": prompts, "sampling_params": GREEDY, "stream": stream}
    first, second = pair.post("/generate", body, 3)
    assert first.status_code == 200, first.text
    if stream:
        latest = {one["index"]: one["output_ids"] for one in events(second)}
        assert [latest[index] for index in range(3)] == expected
    else:
        assert [one["output_ids"] for one in second.json()] == expected
    until(pair.is_at_rest)


def test_chat_with_two_completions(pair: Pair, alone: httpx.Client):
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hello"}],
        "n": 2,
        "seed": 3,
        "max_tokens": 8,
    }
    body["model"] = alone.get("/v1/models").json()["data"][0]["id"]
    expected = alone.post("/v1/chat/completions", json=body).json()
    answer = agreed(pair, "/v1/chat/completions", body, 2)
    assert answer["choices"] == expected["choices"]
    assert answer["usage"]["total_tokens"] == expected["usage"]["total_tokens"]


def test_completions_of_two_prompts(pair: Pair, alone: httpx.Client):
    model = alone.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": ["one", "two"], "max_tokens": 6, "temperature": 0}
    expected = alone.post("/v1/completions", json=body).json()
    assert agreed(pair, "/v1/completions", body, 2)["choices"] == expected["choices"]


def test_servers_say_their_role(pair: Pair, alone: httpx.Client):
    modes = []
    for one in (pair.prefill, pair.decode):
        with one.client() as client:
            modes.append(client.get("/server_info").json()["disaggregation_mode"])
    assert modes == ["prefill", "decode"]
    assert alone.get("/server_info").json()["disaggregation_mode"] == "null"


def test_requests_that_no_router_has_paired_are_refused(pair: Pair, alone: httpx.Client):
    body = {"text": PROMPT, "sampling_params": GREEDY}
    for one, role in ((pair.prefill, "prefill"), (pair.decode, "decode")):
        response = post(one, "/generate", body)
        assert response.status_code == 400
        assert f"role {role}" in response.text
    response = alone.post("/generate", json=pair.paired(body))
    assert response.status_code == 400
    assert "bootstrap_room" in response.text


def test_a_bad_request_is_refused_by_both_and_holds_nothing(pair: Pair):
    body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 100_000}}
    first, second = pair.post("/generate", body)
    assert (first.status_code, second.status_code) == (400, 400)
    assert pair.is_at_rest()
