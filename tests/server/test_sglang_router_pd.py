"""The real sglang-router in prefill/decode mode in front of a real pair of servers, which are
processes of their own: `make test-long`.

Its environment is made by `python scripts/peer_env.py router`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.models.conftest import smollm2_dir, tiny_dir  # noqa: F401 - fixtures
from tests.server.conftest import events
from tests.server.test_control import until
from tests.server.test_roles_pd import free_port, serving
from tests.server.test_sglang_router import PYTHON, answers, workers

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not PYTHON.exists(), reason="no sglang-router: run `python scripts/peer_env.py router`"
    ),
]
GREEDY = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
SAMPLED = {"temperature": 0.8, "max_new_tokens": 16, "sampling_seed": 11, "presence_penalty": 0.5}
PHALANX = Path(sys.executable).with_name("phalanx")
PROMPT = "The three largest oceans of the world are"


@contextmanager
def served(model: Path, role: str, *flags: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A `phalanx serve` of its own, and its URL once it is ready."""
    command = [PHALANX, "serve", "--model", model]
    command += ["--role", role, "--port", 0, "--device", "cpu", "--num-threads", 1]
    command += ["--pool-tokens", 4096, "--log-level", "WARNING", *flags]
    process = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert "http://" in line, line
        yield process, line.split()[-1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        process.stdout.close()


@contextmanager
def routing(log: Path, prefill: str, bootstrap_port: int, decode: str) -> Iterator[httpx.Client]:
    port = free_port()
    command = [PYTHON, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", port]
    command += ["--pd-disaggregation", "--prefill", prefill, bootstrap_port, "--decode", decode]
    command += ["--policy", "round_robin", "--prometheus-port", free_port()]
    command += ["--retry-max-retries", 1]
    with log.open("w") as output:
        process = subprocess.Popen(list(map(str, command)), stdout=output, stderr=output)
    try:
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=60.0, verify=False) as client:
            until(lambda: process.poll() is not None or answers(client))
            assert process.poll() is None, log.read_text()
            until(lambda: sum(worker["is_healthy"] for worker in workers(client)) == 2)
            yield client
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def router(smollm2_dir, tmp_path_factory) -> Iterator[httpx.Client]:  # noqa: F811
    port = free_port()
    with ExitStack() as stack:
        flags = ("--bootstrap-port", port, "--set", "plugin_args.transfer=tcp")
        _, prefill = stack.enter_context(served(smollm2_dir, "prefill", *flags))
        _, decode = stack.enter_context(served(smollm2_dir, "decode"))
        log = tmp_path_factory.mktemp("router") / "router.log"
        yield stack.enter_context(routing(log, prefill, port, decode))
        for url in (prefill, decode):
            until(lambda url=url: httpx.get(f"{url}/get_load").json()[0]["num_tokens"] == 0)


@pytest.fixture(scope="module")
def alone(smollm2_dir) -> Iterator[httpx.Client]:  # noqa: F811
    with serving(smollm2_dir) as one, one.client() as client:
        yield client


def test_the_router_knows_the_roles(router: httpx.Client):
    kinds = {worker["worker_type"]: worker["metadata"] for worker in workers(router)}
    assert {kind: facts["disaggregation_mode"] for kind, facts in kinds.items()} == {
        "prefill": "prefill",
        "decode": "decode",
    }


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_generate(router: httpx.Client, alone: httpx.Client, sampling: dict):
    body = {"text": PROMPT, "sampling_params": sampling}
    expected = alone.post("/generate", json=body).json()
    answer = router.post("/generate", json=body).json()
    assert answer["text"] == expected["text"]
    assert answer["output_ids"] == expected["output_ids"]


def test_logprobs_of_prompt_and_output(router: httpx.Client, alone: httpx.Client):
    body = {
        "text": PROMPT,
        "sampling_params": GREEDY,
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    expected = alone.post("/generate", json=body).json()["meta_info"]
    answer = router.post("/generate", json=body).json()["meta_info"]
    for field in ("input_token_logprobs", "output_token_logprobs"):
        assert [one[1] for one in answer[field]] == [one[1] for one in expected[field]]
        values = [one[0] for one in expected[field]]
        assert [one[0] for one in answer[field]] == pytest.approx(values, abs=1e-4)


def test_a_stream(router: httpx.Client, alone: httpx.Client):
    body = {"text": PROMPT, "sampling_params": GREEDY, "stream": True}
    expected = events(alone.post("/generate", json=body))[-1]["output_ids"]
    assert events(router.post("/generate", json=body))[-1]["output_ids"] == expected


def test_a_batch(router: httpx.Client, alone: httpx.Client):
    body = {"input_ids": [[1, 2, 3], [40, 50]], "sampling_params": GREEDY}
    expected = alone.post("/generate", json=body).json()
    answer = router.post("/generate", json=body).json()
    assert [one["output_ids"] for one in answer] == [one["output_ids"] for one in expected]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_openai(router: httpx.Client, alone: httpx.Client, path: str):
    model = alone.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "max_tokens": 8, "temperature": 0, "n": 2}
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": "Name a sea."}]
    else:
        body["prompt"] = PROMPT
    expected = alone.post(path, json=body).json()["choices"]
    assert router.post(path, json=body).json()["choices"] == expected


def test_refusals_come_through(router: httpx.Client):
    body = {"text": PROMPT, "sampling_params": {"temperature": -1.0}}
    response = router.post("/generate", json=body)
    assert response.status_code == 400
    assert "temperature" in response.text


@pytest.mark.parametrize("dead", ["prefill", "decode"])
def test_one_of_the_pair_is_killed(dead: str, tiny_dir, tmp_path: Path):  # noqa: F811
    port = free_port()
    with ExitStack() as stack:
        first, prefill = stack.enter_context(served(tiny_dir, "prefill", "--bootstrap-port", port))
        second, decode = stack.enter_context(served(tiny_dir, "decode"))
        client = stack.enter_context(routing(tmp_path / "log", prefill, port, decode))
        body = {"text": PROMPT, "sampling_params": GREEDY}
        assert client.post("/generate", json=body).status_code == 200
        victim, left = (first, decode) if dead == "prefill" else (second, prefill)
        victim.kill()
        victim.wait()
        response = client.post("/generate", json=body)
        assert response.status_code >= 500
        until(lambda: httpx.get(f"{left}/get_load").json()[0]["num_tokens"] == 0)
