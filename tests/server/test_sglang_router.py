"""The real sglang-router in front of two model servers: `make test-long`.

Its environment is made by `python scripts/peer_env.py router`.
"""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import events
from tests.server.server_process import ServerProcess
from tests.server.test_control import until

PYTHON = Path(__file__).parents[2] / ".venv-router" / "bin" / "python"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not PYTHON.exists(), reason="no sglang-router: run `python scripts/peer_env.py router`"
    ),
]
TEXT = "The sea is wide 北京"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    port, metrics_port = free_port(), free_port()
    log = tmp_path_factory.mktemp("router") / "router.log"
    command = [PYTHON, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
    command += ["--port", port, "--policy", "round_robin", "--prometheus-port", metrics_port]
    with log.open("w") as output:
        process = subprocess.Popen(list(map(str, command)), stdout=output, stderr=output)
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, timeout=60.0, verify=False) as client:
            until(lambda: process.poll() is not None or answers(client))
            assert process.poll() is None, log.read_text()
            yield client
    finally:
        process.terminate()
        process.wait()


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/workers").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def server_process(model_dir: Path) -> Iterator[ServerProcess]:
    with ServerProcess(model_dir) as process:
        yield process


@pytest.fixture(scope="module")
def two_servers(serve, router: httpx.Client, server_process: ServerProcess) -> Iterator[list[str]]:
    """The URLs of a server in this process and of one in a process that can be killed."""
    with serve() as first:
        for url in (first.url, server_process.url):
            response = router.post("/workers", json={"url": url, "worker_type": "regular"})
            assert response.status_code == 202, response.text
        until(lambda: sum(worker["is_healthy"] for worker in workers(router)) == 2)
        yield [first.url, server_process.url]


def workers(router: httpx.Client) -> list[dict]:
    return router.get("/workers").json()["workers"]


def num_accepted(url: str) -> int:
    states = httpx.get(f"{url}/server_info").json()["internal_states"]
    accepted: int = states[0]["num_accepted"]
    return accepted


def test_registered_with_what_the_servers_say(router, two_servers):
    urls = {worker["url"] for worker in workers(router)}
    assert urls == set(two_servers)


def test_generate_is_routed_to_both(router, two_servers):
    before = [num_accepted(server) for server in two_servers]
    for _ in range(4):
        answer = router.post("/generate", json={"text": TEXT, "return_logprob": True}).json()
        assert answer["text"] == TEXT
        meta = answer["meta_info"]
        assert meta["finish_reason"] == {"type": "stop", "matched": 2}
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
    grown = [num_accepted(one) - was for one, was in zip(two_servers, before, strict=True)]
    assert grown == [2, 2]


def test_input_ids_and_sampling_pass(router, two_servers):
    sampling = {"max_new_tokens": 2, "temperature": 0, "sampling_seed": 3, "stop_token_ids": [90]}
    answer = router.post(
        "/generate",
        json={"input_ids": [70, 71, 72], "rid": "routed", "sampling_params": sampling},
    ).json()
    assert answer["output_ids"] == [70, 71]
    assert answer["meta_info"]["id"] == "routed"


def test_generate_streams(router, two_servers):
    chunks = events(router.post("/generate", json={"text": TEXT, "stream": True}))
    assert chunks[-1]["text"] == TEXT
    assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "stop"


def test_chat_and_completions(router, two_servers):
    chat = {"model": "tiny-script", "messages": [{"role": "user", "content": "Hello"}]}
    answer = router.post("/v1/chat/completions", json=chat).json()
    assert answer["choices"][0]["message"]["content"] == "user\nHello"
    streamed = router.post("/v1/chat/completions", json={**chat, "stream": True}).text
    deltas = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    text = "".join(one["choices"][0]["delta"].get("content", "") for one in deltas)
    assert text == "user\nHello"
    completion = {"model": "tiny-script", "prompt": "ab"}
    assert router.post("/v1/completions", json=completion).json()["choices"][0]["text"] == "ab"


def test_refusals_come_through(router, two_servers):
    body = {"text": "a", "sampling_params": {"temperature": -1.0}}
    response = router.post("/generate", json=body)
    assert response.status_code == 400
    assert "temperature" in response.text


def test_one_server_killed_the_other_answers(router, two_servers, server_process):
    before = num_accepted(two_servers[0])
    server_process.kill()
    for _ in range(4):
        assert router.post("/generate", json={"text": TEXT}).json()["text"] == TEXT
    assert num_accepted(two_servers[0]) == before + 4
