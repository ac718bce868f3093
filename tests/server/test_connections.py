"""Clients that leave, and clients that stay and do not read."""

import json
import socket
from collections.abc import Iterator

import pytest

from tests.server.running import RunningServer
from tests.server.test_control import ENDLESS, load, paused, until


@pytest.fixture(scope="module")
def server(serve) -> Iterator[RunningServer]:
    with serve(pace_s=0.001, runtime={"stall_timeout_s": 0.3}) as running_server:
        yield running_server


def connect(server: RunningServer, path: str, body: dict) -> socket.socket:
    """A connection over which one request was sent, with as small a receive buffer as can be."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    connection.connect((host, int(port)))
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(payload)}\r\n\r\n"
    connection.sendall(head.encode() + payload)
    return connection


@pytest.mark.parametrize(
    "path, body",
    [
        ("/generate", {"text": "abc", "sampling_params": ENDLESS}),
        ("/generate", {"text": "abc", "sampling_params": ENDLESS, "stream": True}),
        ("/generate", {"text": ["a", "b"], "sampling_params": ENDLESS, "stream": True}),
        ("/generate", {"text": ["a", "b"], "sampling_params": ENDLESS}),
        ("/generate", {"input_ids": [70] * 50_000, "stream": True}),
        ("/v1/completions", {"prompt": "abc", "max_tokens": 90_000, "ignore_eos": True}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True, "stream": True},
        ),
    ],
)
def test_client_that_disconnects_aborts_its_requests(server, client, path, body):
    with connect(server, path, body):
        until(lambda: load(client)["num_running_reqs"] >= 1)
    until(lambda: load(client)["num_total_reqs"] == 0)


def test_client_that_disconnects_while_it_waits(server, client):
    with paused(client):
        for stream in (False, True):
            with connect(server, "/generate", {"text": "abc", "stream": stream}):
                until(lambda: load(client)["num_total_reqs"] == 1)
            until(lambda: load(client)["num_total_reqs"] == 0)


def test_client_that_disconnects_in_its_body(server, client):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert client.post("/generate", json={"text": "a"}).status_code == 200


@pytest.mark.parametrize(
    "path, body",
    [
        ("/generate", {"text": "abc" * 30, "sampling_params": ENDLESS, "stream": True}),
        pytest.param(
            "/v1/completions",
            {
                "prompt": "abc",
                "max_tokens": 90_000,
                "ignore_eos": True,
                "stream": True,
                "logprobs": 20,
            },
            marks=pytest.mark.long,
        ),
    ],
)
def test_client_that_stops_reading_is_cut_off_and_blocks_nobody(server, client, path, body):
    with connect(server, path, body) as connection:
        until(lambda: load(client)["num_running_reqs"] == 1)
        # The others are served while the connection is full, and after.
        assert client.post("/generate", json={"text": "abc"}).json()["text"] == "abc"
        until(lambda: load(client)["num_total_reqs"] == 0)
        assert client.post("/generate", json={"text": "abc"}).json()["text"] == "abc"
        received = b""
        try:
            while chunk := connection.recv(1 << 20):
                received += chunk
        except ConnectionResetError:
            pass
        # Cut off, or told so where it began to read again at the last moment: what was lost
        # cannot be taken for the whole.
        assert b"[DONE]" not in received or b"stall_timeout_s" in received


def test_keep_alive_connection_serves_one_request_after_another(client, server):
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"text": "ab", "stream": True})
    request = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    with socket.create_connection((host, int(port))) as connection:
        for _ in range(3):
            connection.sendall(request.encode())
            received = b""
            while not received.endswith(b"0\r\n\r\n"):
                received += connection.recv(65536)
            assert received.startswith(b"HTTP/1.1 200")
            assert b"[DONE]" in received
