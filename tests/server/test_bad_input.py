"""Input that is wrong, too large or malicious: each gets its status, and the server goes on."""

import json
import socket

import httpx
import pytest

from phalanx.schema.sampling import MAX_STOP_EXPRESSIONS, MAX_STOP_STRINGS
from phalanx.server.text_service import MAX_BATCH_EXPRESSIONS


@pytest.fixture(autouse=True)
def server_goes_on(client):
    yield
    assert client.post("/generate", json={"text": "still here"}).json()["text"] == "still here"


def refused(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    answer = response.json()
    return answer["error"]["message"] if "error" in answer else answer["message"]


@pytest.mark.parametrize(
    "body, named",
    [
        ({"text": 5}, "text"),
        ({"text": "a", "stream": "yes"}, "stream"),
        ({"text": "a", "sampling_params": {"temperature": "hot"}}, "temperature"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 1.5}}, "max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": True}}, "max_new_tokens"),
        ({"text": "a", "sampling_params": []}, "sampling_params"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"text": "a", "rid": 7}, "rid"),
        ({"text": "a", "sampling_params": {"logit_bias": {"-1": 1}}}, "logit_bias"),
        ({"text": ["a", "b"], "rid": ["one"]}, "rid"),
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
    ],
)
def test_wrong_types(client, body, named):
    response = client.post("/generate", json=body)
    assert named in refused(response)
    assert response.json()["object"] == "error"
    assert response.json()["code"] == 400
    assert response.json()["type"] == "Bad Request"


@pytest.mark.parametrize("body", [b"[]", b"5", b'"text"', b"null"])
def test_body_that_is_no_object(client, body):
    refused(client.post("/generate", content=body))


@pytest.mark.parametrize("body", [b"", b"{", b'{"text": "abc', b'{"text": "a"} x', b"\xff\xfe"])
def test_truncated_or_broken_json(client, body):
    assert "JSON" in refused(client.post("/generate", content=body))
    assert "JSON" in refused(
        client.post("/v1/completions", content=body.replace(b"text", b"prompt"))
    )


@pytest.mark.parametrize(
    "value, hinted", [(b"NaN", True), (b"-Infinity", True), (b'"NaN \\ud800"', False)]
)
def test_the_hint_at_nan_is_for_those_who_sent_it(client, value, hinted):
    for path, field in (("/generate", b"text"), ("/v1/completions", b"prompt")):
        message = refused(client.post(path, content=b'{"%b": %b}' % (field, value)))
        assert ("NaN and Infinity" in message) == hinted


def test_openai_routes_name_the_limit_that_was_sent(client):
    ask = {"messages": [{"role": "user", "content": "a"}]}
    for path, name, body in (
        ("/v1/completions", "max_tokens", {"prompt": "a"}),
        ("/v1/chat/completions", "max_completion_tokens", ask),
    ):
        response = client.post(path, json={**body, name: 10**6})
        assert f" {name}=1000000 " in refused(response)
        assert response.json()["error"]["param"] == name


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"max_new_tokens": -4}, "sampling_params.max_new_tokens"),
        ({"max_new_tokens": "x"}, "sampling_params.max_new_tokens"),
        ({"temprature": 1}, "sampling_params.temprature"),
    ],
)
def test_a_refusal_of_generate_names_the_field(client, sampling, field):
    answer = client.post("/generate", json={"text": "a", "sampling_params": sampling}).json()
    assert (answer["error"] if "error" in answer else answer)["param"] == field


def test_deeply_nested_json(client):
    body = b'{"custom_labels": ' + b"[" * 100_000
    refused(client.post("/generate", content=body))
    refused(client.post("/v1/chat/completions", content=b'{"messages": ' + b"[" * 100_000))


def test_unknown_field_is_told_the_nearest(client):
    message = refused(client.post("/generate", json={"text": "a", "samplng_params": {}}))
    assert "did you mean 'sampling_params'" in message
    body = {"text": "a", "sampling_params": {"max_tokens": 5}}
    assert "'max_tokens' in sampling_params" in refused(client.post("/generate", json=body))


@pytest.mark.parametrize(
    "field, value",
    [
        ("image_data", ["x"]),
        ("lora_path", "adapter"),
        ("session_params", {"id": 1}),
        ("return_hidden_states", True),
        ("return_routed_experts", True),
        ("input_embeds", [[0.5]]),
    ],
)
def test_known_but_unsupported_field(client, field, value):
    message = refused(client.post("/generate", json={"text": "a", field: value}))
    assert f"{field} is not supported" in message


def test_what_serves_the_end_of_an_adapter_is_told(client):
    message = refused(client.post("/generate", json={"text": "a", "lora_path": "adapter"}))
    assert "merge it into the weights" in message


@pytest.mark.parametrize("path", ["/classify", "/v1/embeddings", "/v1/score"])
def test_a_model_of_text_says_what_to_ask_instead_of_classes_and_scores(client, path):
    response = client.post(path, json={"text": "a"})
    assert response.status_code == 404
    assert "/generate with return_logprob" in response.text


def test_unknown_model(client):
    body = {"model": "gpt-x", "prompt": "a"}
    response = client.post("/v1/completions", json=body)
    assert "tiny-script" in refused(response, 404)
    assert response.json()["error"]["code"] == "model_not_found"
    refused(client.post("/generate", json={"model": "gpt-x", "text": "a"}), 404)


@pytest.mark.parametrize(
    "body", [{"text": ""}, {"input_ids": []}, {"text": []}, {"text": ["a", ""]}]
)
def test_empty_prompt(client, body):
    assert "empty" in refused(client.post("/generate", json=body))


def test_empty_prompt_of_completions(client):
    for prompt in ("", [], [[]]):
        refused(client.post("/v1/completions", json={"model": "tiny-script", "prompt": prompt}))


def test_prompt_beyond_the_context(serve):
    with serve(context_length=50) as server, server.client() as client:
        message = refused(client.post("/generate", json={"input_ids": [70] * 51}))
        assert "50" in message
        chat = {"messages": [{"role": "user", "content": "long " * 100}]}
        refused(client.post("/v1/chat/completions", json=chat))
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200


@pytest.mark.parametrize("ids", [[-1], [10**6], [2**70]])
def test_ids_outside_the_vocabulary(client, ids):
    refused(client.post("/generate", json={"input_ids": ids}))


@pytest.mark.parametrize(
    "sampling",
    [
        '{"temperature": -0.5}',
        '{"temperature": NaN}',
        '{"temperature": Infinity}',
        '{"temperature": 1e999}',
        '{"top_p": 0}',
        '{"top_p": 1.5}',
        '{"top_k": 0}',
        '{"min_p": -1}',
        '{"repetition_penalty": 0}',
        '{"frequency_penalty": 3}',
        '{"max_new_tokens": -1}',
        '{"n": 0}',
        '{"n": 1000000}',
        '{"min_new_tokens": 5, "max_new_tokens": 2}',
    ],
)
def test_negative_and_nan_sampling_values(client, sampling):
    body = f'{{"text": "a", "sampling_params": {sampling}}}'
    refused(client.post("/generate", content=body))


def test_logprob_start_beyond_the_prompt(client):
    body = {"input_ids": [70], "return_logprob": True, "logprob_start_len": 2}
    assert "logprob_start_len" in refused(client.post("/generate", json=body))


@pytest.mark.parametrize("stream", [False, True])
def test_a_thousand_stop_strings(client, stream):
    stops = [f"stop{at}" for at in range(1000)]
    body = {"text": "a", "stream": stream, "sampling_params": {"stop": stops}}
    assert str(MAX_STOP_STRINGS) in refused(client.post("/generate", json=body))
    body["sampling_params"]["stop"] = stops[:MAX_STOP_STRINGS]
    assert client.post("/generate", json=body).status_code == 200


def test_too_many_stop_expressions(client):
    expressions = [f"stop{at}" for at in range(1000)]
    body = {"text": "a", "sampling_params": {"stop_regex": expressions}}
    assert str(MAX_STOP_EXPRESSIONS) in refused(client.post("/generate", json=body))
    body["sampling_params"]["stop_regex"] = expressions[:MAX_STOP_EXPRESSIONS]
    assert client.post("/generate", json=body).status_code == 200


def test_too_many_stop_expressions_in_a_batch(client):
    params = [{"stop_regex": f"stop{at}"} for at in range(MAX_BATCH_EXPRESSIONS + 1)]
    body = {"text": ["a"] * len(params), "sampling_params": params}
    assert str(MAX_BATCH_EXPRESSIONS) in refused(client.post("/generate", json=body))
    params[-1] = params[0]
    assert client.post("/generate", json=body).status_code == 200


def test_expression_that_cannot_match(client):
    body = {"text": "abc", "sampling_params": {"stop_regex": r"[^\s\S]"}}
    assert client.post("/generate", json=body).json()["text"] == "abc"


@pytest.mark.parametrize("expression", ["(", "(?=a)b", "((a{99}){99}){99}", "a*"])
def test_expression_that_cannot_be_used(client, expression):
    body = {"text": "a", "sampling_params": {"stop_regex": expression}}
    assert "stop_regex" in refused(client.post("/generate", json=body))


def test_ten_megabyte_body_is_refused_by_its_length(serve):
    with serve(server={"max_request_bytes": 1_000_000}) as server, server.client() as client:
        response = client.post("/generate", json={"text": "a" * 10_000_000})
        assert "max_request_bytes=1000000" in refused(response, 413)
        chunks = (b"a" * 100_000 for _ in range(100))
        response = client.post("/v1/completions", content=chunks)
        assert "max_request_bytes=1000000" in refused(response, 413)


def test_large_body_is_refused_before_it_is_sent(serve):
    with serve(server={"max_request_bytes": 1000}) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST /generate HTTP/1.1\r\nHost: {host}\r\nContent-Length: 1000000000\r\n\r\n"
            connection.sendall(head.encode())
            answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"connection: close" in answer


def test_ten_megabytes_are_served_where_they_are_allowed(client):
    response = client.post(
        "/generate", json={"text": "The sea " * 1_250_000, "sampling_params": {"max_new_tokens": 1}}
    )
    assert "characters, more than the context" in refused(response)


@pytest.mark.parametrize(
    "method, path, status",
    [
        ("GET", "/generate", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/nowhere", 404),
        ("POST", "/v1/embeddings", 404),
    ],
)
def test_wrong_method_and_path(client, method, path, status):
    response = client.request(method, path)
    assert path in refused(response, status)


def test_bytes_that_are_not_http(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert b"400" in connection.recv(4096)


def test_rids_of_a_batch_that_are_not_distinct(client):
    body = {"text": ["a", "b"], "rid": ["same", "same"]}
    assert "distinct" in refused(client.post("/generate", json=body))


def test_control_bodies(client):
    assert "mode" in refused(client.post("/pause_generation", json={"mode": "forever"}))
    refused(client.post("/abort_request", json={"rid": 5}))
    refused(client.post("/abort_request", content=b"{"))
    assert "timeout" in refused(client.get("/flush_cache", params={"timeout": "soon"}))


def test_request_id_is_given_back(client):
    response = client.post("/generate", json={"text": "a"}, headers={"x-request-id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1"
    hostile = client.get("/ping", headers={"x-request-id": "x" * 1000})
    assert len(hostile.headers["x-request-id"]) == 32


def test_json_of_errors_parses(client):
    response = client.post("/generate", content=b'{"text": "\xc3\xa9", "bad\\"field": 1}')
    assert json.loads(response.content)["code"] == 400
