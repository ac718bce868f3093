"""Release and resume over HTTP: what is free, what comes back, and what is refused."""

import pytest

from tests.server.rl.asking import ENDLESS, LONG, PROMPT, abort_all, answer, ids, memory, post
from tests.server.rl.models import POOL_TOKENS, serving, write_llama
from tests.server.test_control import Streamed, load, until, whole

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
ALL = ["cuda_graph", "kv_cache", "weights"]
CHAT = {"messages": [{"role": "user", "content": "a"}]}
REQUESTS = [
    ("/generate", {"input_ids": PROMPT}),
    ("/generate", {"input_ids": PROMPT, "stream": True}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/v1/completions", {"prompt": "a"}),
    ("/generate/", {"prompts": ["a"]}),
]


def test_asleep_is_503_on_every_route_and_wakes_to_the_same_answers(client):
    before = ids(client)
    response = post(client, RELEASE)
    assert (response.content, response.headers["content-type"]) == (b"null", "application/json")
    for path, body in REQUESTS:
        refused = client.post(path, json=body)
        assert refused.status_code == 503, path
        assert refused.headers["retry-after"] == "1"
        assert "asleep" in refused.text
    assert client.get("/health").status_code == 200
    ready = client.get("/ready")
    assert (ready.status_code, ready.text) == (503, "asleep: cuda_graph, kv_cache, weights\n")
    assert client.get("/health_generate").status_code == 503
    assert client.get("/server_info").json()["status"] == "asleep"
    assert client.get("/v1/models").status_code == 200
    assert client.post("/tokenize", json={"prompt": "a"}).json()["count"] == 1
    assert post(client, RESUME).content == b"null"
    assert client.get("/ready").status_code == 200
    assert ids(client) == before


def test_who_is_refused_is_told_how_to_wake_it(client):
    post(client, "/release_memory_occupation", {})
    refused = client.post("/generate", json={"text": "a"})
    assert (refused.status_code, "POST /resume_memory_occupation" in refused.text) == (503, True)


def test_tags_one_by_one_and_unknown_ones(client):
    post(client, RELEASE, {"tags": ["kv_cache"]})
    told = memory(client)
    assert (told["resident"], told["asleep"]) == (["cuda_graph", "weights"], ["kv_cache"])
    assert not told["waiting_for_weights"] and told["rss_bytes"] > 0
    post(client, RELEASE, {"tags": ["weights", "cuda_graph"]})
    assert memory(client)["asleep"] == ALL
    post(client, RESUME, {"tags": ["weights"]})
    assert memory(client)["asleep"] == ["cuda_graph", "kv_cache"]
    assert client.post("/generate", json={"input_ids": PROMPT}).status_code == 503
    post(client, RESUME, {"tags": ["kv_cache", "cuda_graph"]})
    assert memory(client)["resident"] == ALL
    for path in (RELEASE, RESUME):
        refused = post(client, path, {"tags": ["kv"]}, 400)
        assert "'kv' is no part" in refused.text and "weights, kv_cache" in refused.text
    assert memory(client)["resident"] == ALL


def test_complaint_sglang_24123_repeated_and_unmatched_calls_change_nothing(client):
    before = ids(client)
    post(client, RESUME)  # nothing was released
    post(client, RESUME, {"tags": ["weights"]})
    assert ids(client) == before
    for _ in range(2):
        post(client, RELEASE, {"tags": ["weights"]})
    post(client, RESUME, {"tags": ["kv_cache"]})
    assert memory(client)["asleep"] == ["weights"]
    for _ in range(2):
        post(client, RESUME, {"tags": []})
    assert ids(client) == before
    for method in ("GET", "POST"):
        assert client.request(method, RELEASE).status_code == 200
    post(client, RESUME, {"tags": None})
    assert ids(client) == before


def test_complaint_sglang_24119_release_while_busy_is_refused_and_serving_goes_on(
    server, client, pool
):
    stream = Streamed(server, input_ids=PROMPT, sampling_params=ENDLESS)
    refused = post(client, RELEASE, status=400)
    assert "memory was not released: requests are running" in refused.json()["error"]["message"]
    assert memory(client)["asleep"] == []
    abort_all(client)
    assert b'"type":"abort"' in stream.rest()
    stream.close()
    until(lambda: load(client)["num_total_reqs"] == 0)
    post(client, RELEASE)


def test_paused_requests_survive_a_sleep(server, client, pool):
    """Retracted ones are computed anew after it, and say the same."""
    expected = answer(client, sampling_params=LONG)["output_ids"]
    stream = Streamed(server, input_ids=PROMPT, sampling_params=LONG)
    post(client, "/pause_generation", {"mode": "retract"})
    post(client, RELEASE)
    assert memory(client)["asleep"] == ALL
    post(client, RESUME)
    post(client, "/continue_generation")
    rest = stream.rest()
    stream.close()
    last = rest.rsplit(b"data: ", 2)[-2]
    assert str(expected).replace(" ", "").encode() in last


def test_complaint_relax_282_b_no_prefill_is_left_over_after_a_release(server, client, pool):
    """The request that slips in between pause and release is held, and begins after waking."""
    before = ids(client)
    stream = Streamed(server, input_ids=PROMPT, sampling_params=ENDLESS)
    post(client, "/pause_generation")
    held = whole(pool, server, input_ids=PROMPT * 40, sampling_params={"max_new_tokens": 1})
    until(lambda: load(client)["num_total_reqs"] == 1)
    post(client, RELEASE)
    steps = client.get("/server_info").json()["internal_states"][0]["loop"]["num_steps"]
    assert client.get("/server_info").json()["internal_states"][0]["loop"]["num_running"] == 0
    assert not held.done()
    post(client, RESUME)
    assert client.get("/server_info").json()["internal_states"][0]["loop"]["num_steps"] == steps
    assert not held.done()
    post(client, "/continue_generation")
    assert held.result()["meta_info"]["completion_tokens"] == 1
    assert b'"type":"abort"' in stream.rest()
    stream.close()
    assert ids(client) == before


def test_complaint_slime_2015_pause_drain_flush_release_is_a_point_of_rest(server, client, pool):
    """A request that comes after the pause does not keep the flush from succeeding."""
    stream = Streamed(server, input_ids=PROMPT, sampling_params=ENDLESS)
    post(client, "/pause_generation")
    assert b'"type":"abort"' in stream.rest()
    stream.close()
    held = whole(pool, server, input_ids=PROMPT, sampling_params={"max_new_tokens": 2})
    until(lambda: load(client)["num_total_reqs"] == 1)
    assert client.get("/flush_cache").status_code == 200
    post(client, RELEASE)
    assert memory(client)["asleep"] == ALL
    post(client, RESUME)
    post(client, "/continue_generation")
    assert len(held.result()["output_ids"]) == 2


def test_complaint_slime_579_memory_is_free_when_release_answers(tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
    directory = write_llama(tmp_path / "larger", 1, **sizes)
    num_bytes = (directory / "model.safetensors").stat().st_size
    with serving(directory, pool_tokens=POOL_TOKENS) as server, server.client() as client:
        before = ids(client)
        awake = memory(client)["rss_bytes"]
        post(client, RELEASE)
        asleep = memory(client)["rss_bytes"]
        assert awake - asleep > 0.8 * num_bytes
        post(client, RESUME)
        assert ids(client) == before
        post(client, RELEASE)
        assert awake - memory(client)["rss_bytes"] > 0.5 * num_bytes


def test_static_server_sleeps_and_wakes_too(first_dir):
    with serving(first_dir, server={"weight_source": "static"}) as server:
        with server.client() as client:
            before = ids(client)
            post(client, RELEASE)
            post(client, RESUME)
            assert ids(client) == before


@pytest.mark.parametrize("tags", [["weights"], ["kv_cache"], ["cuda_graph"]])
def test_any_part_asleep_refuses_requests(client, tags):
    post(client, RELEASE, {"tags": tags})
    refused = client.post("/generate", json={"input_ids": PROMPT})
    assert (refused.status_code, tags[0] in refused.text) == (503, True)
    post(client, RESUME, {"tags": tags})
    ids(client)


def test_a_caller_whose_engine_another_one_has_taken_over_is_told_so(client):
    def call(path: str, header: str | None) -> tuple[int, str]:
        headers = {} if header is None else {"x-phalanx-call": header}
        answered = client.post(path, json={}, headers=headers)
        return answered.status_code, answered.text

    assert call(RELEASE, "first/1")[0] == 200
    assert call(RESUME, None)[0] == 200  # an operator's own call takes nothing over
    assert call(RELEASE, "first/2")[0] == 200
    assert call(RELEASE, "second/1")[0] == 200
    for number in (3, 4):
        status, text = call(RESUME, f"first/{number}")
        assert status == 400
        assert "caller 'second' at 127.0.0.1 has taken this engine's memory over since" in text
        assert "phalanx recover ROLE/MODEL/N" in text
    assert memory(client)["asleep"] == ALL
    assert call(RESUME, "second/2")[0] == 200


def test_d9_a_numbered_call_that_comes_after_a_later_one_changes_nothing(client):
    def call(path: str, number: int) -> int:
        headers = {"x-phalanx-call": f"manager/{number}"}
        return client.post(path, json={}, headers=headers).status_code

    assert call(RELEASE, 2) == 200
    assert call(RESUME, 1) == 400
    assert memory(client)["asleep"] == ALL
    assert call(RESUME, 3) == 200
    assert memory(client)["resident"] == ALL
