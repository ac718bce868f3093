"""Abort, pause, flush, info and metrics while requests are in every state."""

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from tests.server.conftest import events
from tests.server.running import RunningServer

ENDLESS = {"ignore_eos": True, "max_new_tokens": 90_000}


class Streamed:
    """A /generate stream that is read up to its first chunk, and then on demand."""

    def __init__(self, server: RunningServer, **body: object) -> None:
        self._client = server.client()
        self._stream = self._client.stream("POST", "/generate", json={"stream": True, **body})
        self.response = self._stream.__enter__()
        self._chunks = self.response.iter_bytes()
        self.first = next(self._chunks)

    def rest(self) -> bytes:
        return b"".join(self._chunks)

    def close(self) -> None:
        self._stream.__exit__(None, None, None)
        self._client.close()


@pytest.fixture(scope="module")
def server(serve) -> Iterator[RunningServer]:
    # Each tick takes a millisecond, so that endless requests do not take a whole core.
    with serve(pace_s=0.001, max_batch_size=2) as running_server:
        yield running_server


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as executor:
        yield executor


@contextmanager
def paused(client: httpx.Client) -> Iterator[None]:
    assert client.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
    try:
        yield
    finally:
        assert client.post("/continue_generation").status_code == 200


def load(client: httpx.Client) -> dict:
    return client.get("/v1/loads", params={"include": "core"}).json()["loads"][0]


def until(condition) -> None:
    """Asks the server again until it says so; each question is an event of its loop."""
    while not condition():
        threading.Event().wait(0.005)


def whole(pool: ThreadPoolExecutor, server: RunningServer, **body: object) -> Future:
    def post() -> dict:
        with server.client() as client:
            response = client.post("/generate", json=body)
            assert response.status_code == 200, response.text
            return response.json()

    return pool.submit(post)


def test_abort_of_a_decoding_request_keeps_its_tokens(server, client):
    stream = Streamed(server, text="abc", rid="dec-1", sampling_params=ENDLESS)
    assert client.post("/abort_request", json={"rid": "dec-"}).content == b""
    last = stream.rest().decode()
    assert '"type":"abort"' in last
    assert last.endswith("data: [DONE]\n\n")
    stream.close()


def test_abort_hands_out_what_was_held_back_for_a_stop_string(server, client, tokenizer):
    # The text is "abcabc...", all of whose newest 900 characters may begin the stop string.
    sampling = {**ENDLESS, "stop": "abc" * 300 + "d"}
    stream = Streamed(server, text="abc", rid="half-1", sampling_params=sampling)
    client.post("/abort_request", json={"rid": "half-1"})
    *_, last, done = (stream.first + stream.rest()).decode().strip().split("\n\n")
    stream.close()
    assert done == "data: [DONE]"
    result = json.loads(last.removeprefix("data: "))
    assert result["meta_info"]["finish_reason"]["type"] == "abort"
    assert result["output_ids"]
    assert result["text"] == tokenizer.decode(result["output_ids"])


def test_abort_of_a_whole_answer_is_200_with_what_there_is(server, client, pool):
    answer = whole(pool, server, text="abc", rid="dec-2", sampling_params=ENDLESS)
    until(lambda: load(client)["num_running_reqs"] == 1)
    client.post("/abort_request", json={"rid": "dec-2"})
    result = answer.result()
    assert result["meta_info"]["finish_reason"]["type"] == "abort"
    assert "status_code" not in result["meta_info"]["finish_reason"]
    assert len(result["output_ids"]) == result["meta_info"]["completion_tokens"]


def test_abort_by_the_id_of_one_completion_ends_its_prompt(server, client, pool):
    sampling = {**ENDLESS, "n": 2}
    answer = whole(pool, server, text="abc", rid="many", sampling_params=sampling)
    stream = Streamed(server, text="abc", rid="many-2", sampling_params=sampling)
    assert b'"id":"many-2_' in stream.first
    until(lambda: load(client)["num_running_reqs"] == 2)
    client.post("/abort_request", json={"rid": "many-2_1"})
    assert b'"type":"abort"' in stream.rest()
    stream.close()
    assert not answer.done()
    client.post("/abort_request", json={"rid": "many_0"})
    ids = [one["meta_info"]["id"] for one in answer.result()]
    assert ids == ["many_0", "many_1"]


def test_abort_of_a_prefilling_request(server, client, pool):
    # 50,000 tokens at 8 a tick: no token comes before it is aborted.
    answer = whole(pool, server, input_ids=[70] * 50_000, rid="pre-1")
    until(lambda: load(client)["num_running_reqs"] == 1)
    client.post("/abort_request", json={"rid": "pre-1"})
    result = answer.result()
    assert result["output_ids"] == []
    assert result["meta_info"]["finish_reason"]["type"] == "abort"


def test_abort_of_a_waiting_request(server, client, pool):
    running = [
        Streamed(server, text="a", rid=f"run-{at}", sampling_params=ENDLESS) for at in (0, 1)
    ]
    answer = whole(pool, server, text="abc", rid="wait-1")
    until(lambda: load(client)["num_waiting_reqs"] == 1)
    client.post("/abort_request", json={"rid": "wait-1"})
    result = answer.result()
    assert (result["text"], result["meta_info"]["finish_reason"]["type"]) == ("", "abort")
    client.post("/abort_request", json={"abort_all": True})
    for stream in running:
        assert b"abort" in stream.rest()
        stream.close()


def test_abort_of_a_paused_request(server, client, pool):
    with paused(client):
        answer = whole(pool, server, text="abc", rid="held-1")
        until(lambda: load(client)["num_total_reqs"] == 1)
        client.post("/abort_request", json={"rid": "held"})
        assert answer.result()["meta_info"]["finish_reason"]["type"] == "abort"


def test_abort_without_rid_or_of_nobody_does_nothing(server, client, pool):
    with paused(client):
        answer = whole(pool, server, text="abc", rid="kept")
        until(lambda: load(client)["num_total_reqs"] == 1)
        for body in ({}, {"rid": ""}, {"rid": "other"}, {"rid": "", "abort_all": False}):
            response = client.post("/abort_request", json=body)
            assert (response.status_code, response.content) == (200, b"")
    assert answer.result()["text"] == "abc"


def test_pause_aborts_and_holds_new_requests_open(server, client, pool):
    stream = Streamed(server, text="abc", sampling_params=ENDLESS)
    response = client.post("/pause_generation")
    assert response.json() == {"message": "Generation paused successfully.", "status": "ok"}
    assert b'"type":"abort"' in stream.rest()
    stream.close()
    held = whole(pool, server, text="held")
    until(lambda: load(client)["num_total_reqs"] == 1)
    assert not held.done()
    client.post("/continue_generation", json={})
    assert held.result()["text"] == "held"


def test_rid_of_a_live_request_is_refused(server, client, pool):
    with paused(client):
        first = whole(pool, server, text="abc", rid="twice")
        until(lambda: load(client)["num_total_reqs"] == 1)
        again = client.post("/generate", json={"text": "abc", "rid": "twice"})
        assert again.status_code == 400
        assert "'twice'" in again.json()["error"]["message"]
    assert first.result()["text"] == "abc"


def test_flush_is_the_idle_probe(server, client, pool):
    for method in ("GET", "POST"):
        assert client.request(method, "/flush_cache").status_code == 200
    with paused(client):
        answer = whole(pool, server, text="abc")
        until(lambda: load(client)["num_total_reqs"] == 1)
        busy = client.get("/flush_cache")
        assert busy.status_code == 400
        assert "not flushed" in busy.text
    answer.result()
    assert client.post("/flush_cache", params={"timeout": 5}).status_code == 200


def test_two_hundred_concurrent_requests(server, client):
    async def ask_all() -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=server.url, timeout=60.0, verify=False, limits=limits
        ) as many:
            asked = [many.post("/generate", json={"text": f"no {at}"}) for at in range(200)]
            return [answer.json()["text"] for answer in await asyncio.gather(*asked)]

    assert asyncio.run(ask_all()) == [f"no {at}" for at in range(200)]
    assert load(client)["num_total_reqs"] == 0


def test_full_queue_is_503_with_retry_after(serve, pool):
    with serve(runtime={"max_pending_requests": 2}) as server, server.client() as client:
        client.post("/pause_generation", json={"mode": "in_place"})
        held = [whole(pool, server, text="abc") for _ in range(2)]
        until(lambda: load(client)["num_total_reqs"] == 2)
        for path, body in (
            ("/generate", {"text": "a"}),
            ("/generate", {"text": "a", "stream": True}),
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            response = client.post(path, json=body)
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
        assert 'outcome="overloaded"} 4.0' in client.get("/metrics").text
        client.post("/continue_generation")
        assert [one.result()["text"] for one in held] == ["abc", "abc"]


def test_batch_that_does_not_fit_the_queue_leaves_nothing_behind(serve, pool):
    with serve(runtime={"max_pending_requests": 3}) as server, server.client() as client:
        for stream in (False, True):
            with paused(client):
                held = whole(pool, server, text="abc")
                until(lambda: load(client)["num_total_reqs"] == 1)
                body = {"text": ["a"] * 3, "stream": stream}
                assert client.post("/generate", json=body).status_code == 503
                until(lambda: load(client)["num_total_reqs"] == 1)
            assert held.result()["text"] == "abc"
        body = {"text": ["a"] * 4}
        response = client.post("/generate", json=body)
        assert response.status_code == 400
        assert "max_pending_requests=3" in response.json()["error"]["message"]


def test_info(client, model_dir):
    model = client.get("/model_info").json()
    assert model == client.get("/get_model_info").json()
    assert model["model_path"] == str(model_dir)
    assert model["served_model_name"] == "tiny-script"
    assert (model["weight_version"], model["is_generation"]) == ("default", True)
    server = client.get("/server_info").json()
    assert server["tp_size"] == server["dp_size"] == server["pp_size"] == 1
    assert server["disaggregation_mode"] == "null"
    assert server["internal_states"][0]["loop"]["paused"] is False
    assert client.get("/get_server_info").status_code == 200
    assert client.get("/get_weight_version").json() == {"weight_version": "default"}
    assert client.get("/get_load").json()[0]["num_reqs"] == 0


def test_health(client):
    for path in ("/health", "/ready", "/ping", "/health_generate"):
        assert client.get(path).status_code == 200


def test_health_generate_fails_while_nothing_is_generated(serve):
    config = {"health_generate_timeout_s": 0.05}
    with serve(server=config) as server, server.client() as client:
        with paused(client):
            assert client.get("/health_generate").status_code == 503
            assert client.get("/health").status_code == 200
        until(lambda: client.get("/health_generate").status_code == 200)


def test_health_generate_passes_where_a_full_queue_moves(serve):
    config = {"health_generate_timeout_s": 30.0}
    runtime = {"max_pending_requests": 1}
    with serve(server=config, runtime=runtime, pace_s=0.001) as server, server.client() as client:
        stream = Streamed(server, text="a", sampling_params=ENDLESS)
        assert client.get("/health_generate").status_code == 200
        client.post("/abort_request", json={"abort_all": True})
        stream.rest()
        stream.close()


def test_health_generate_fails_where_a_full_queue_stands_still(serve, pool):
    config = {"health_generate_timeout_s": 0.05}
    runtime = {"max_pending_requests": 1}
    with serve(server=config, runtime=runtime) as server, server.client() as client:
        with paused(client):
            answer = whole(pool, server, text="abc")
            until(lambda: load(client)["num_total_reqs"] == 1)
            assert client.get("/health_generate").status_code == 503
        assert answer.result()["text"] == "abc"


def test_health_generate_passes_where_its_token_is_late_and_others_get_theirs(serve):
    config = {"health_generate_timeout_s": 0.2}
    with serve(server=config, max_batch_size=1, pace_s=0.001) as server, server.client() as client:
        stream = Streamed(server, text="a", sampling_params=ENDLESS)
        assert client.get("/health_generate").status_code == 200
        client.post("/abort_request", json={"abort_all": True})
        stream.rest()
        stream.close()


def test_metrics_count_what_happened(serve):
    with serve() as server, server.client() as client:
        assert client.get("/health_generate").status_code == 200
        client.post("/generate", json={"text": "abc"})
        events(client.post("/generate", json={"text": "abc", "stream": True}))
        client.post("/generate", json={"text": ""})
        client.post("/generate", json={"text": "a", "sampling_params": {"sampling_seed": 666}})
        text = client.get("/metrics").text
    for line in (
        'phalanx_requests_total{outcome="completed"} 2.0',
        'phalanx_requests_total{outcome="refused"} 1.0',
        'phalanx_requests_total{outcome="failed"} 1.0',
        "phalanx_generated_tokens_total 8.0",
        "phalanx_time_to_first_token_seconds_count 1.0",
        # The probe, two answers and a failure: the engine has started them all.
        'phalanx_queue_time_seconds_count{replica="0"} 4.0',
        'phalanx_queue_time_seconds_bucket{le="+Inf",replica="0"} 4.0',
        'phalanx_replica_requests_total{outcome="completed",replica="0"} 3.0',
        'phalanx_replica_requests_total{outcome="failed",replica="0"} 1.0',
        'phalanx_replica_in_flight_requests{replica="0"} 0.0',
        "phalanx_e2e_latency_seconds_count 3.0",
        "phalanx_running_requests 0.0",
        "phalanx_kv_pool_tokens 1e+06",
    ):
        assert line in text, text
    for name in ("inter_token_latency_seconds_bucket", "batch_size", "kv_pool_usage"):
        assert f"phalanx_{name}" in text
