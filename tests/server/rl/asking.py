"""Requests that the tests of this folder send again and again."""

from __future__ import annotations

import httpx

PROMPT = [5, 6, 7, 8]
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
LONG = {"temperature": 0, "max_new_tokens": 300, "ignore_eos": True}
ENDLESS = {"temperature": 0, "max_new_tokens": 3500, "ignore_eos": True}
"""It takes seconds, so that whoever needs it running finds it so, and ends it."""


def answer(client: httpx.Client, **fields: object) -> dict:
    """The answer to a short greedy request."""
    body = {"input_ids": PROMPT, "sampling_params": GREEDY, **fields}
    response = client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def ids(client: httpx.Client, **fields: object) -> list[int]:
    return answer(client, **fields)["output_ids"]


def post(client: httpx.Client, path: str, body: object = None, status: int = 200) -> httpx.Response:
    response = client.post(path, json={} if body is None else body)
    assert response.status_code == status, response.text
    return response


def abort_all(client: httpx.Client) -> None:
    post(client, "/abort_request", {"abort_all": True})


def num_generated(client: httpx.Client) -> int:
    """Tokens that the engine has made since its start."""
    loop = client.get("/server_info").json()["internal_states"][0]["loop"]
    return loop["num_generated_tokens"]


def memory(client: httpx.Client) -> dict:
    return client.get("/server_info").json()["memory"]
