"""Whatever goes wrong between a prefill and a decode server ends in an error, and leaves nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.models.conftest import tiny_dir  # noqa: F401 - a fixture
from tests.server.running import RunningServer
from tests.server.test_control import until
from tests.server.test_roles_pd import PROMPT, Pair, free_port, post, serving, used_tokens

LONG = {"temperature": 0, "max_new_tokens": 150, "ignore_eos": True}
BODY = {"text": PROMPT, "sampling_params": LONG}


@pytest.fixture(scope="module")
def pair(tiny_dir: Path) -> Iterator[Pair]:  # noqa: F811
    port = free_port()
    with ExitStack() as stack:
        prefill = stack.enter_context(
            serving(tiny_dir, "prefill", server={"bootstrap_port": port, "handoff_timeout_s": 30})
        )
        decode = stack.enter_context(serving(tiny_dir, "decode", server={"handoff_timeout_s": 30}))
        pool = stack.enter_context(ThreadPoolExecutor(8))
        yield Pair(prefill, decode, port, pool)


def in_flight(server: RunningServer) -> int:
    return server.engine.statistics().num_in_flight


def abort(server: RunningServer, rid: str) -> None:
    assert post(server, "/abort_request", {"rid": rid}).status_code == 200


class Leaving:
    """A client that sends a request, and can hang up."""

    def __init__(self, server: RunningServer, body: dict) -> None:
        content = httpx.Request("POST", f"{server.url}/generate", json=body)
        host, port = server.url.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)))
        lines = [b"POST /generate HTTP/1.1", b"host: here"]
        lines += [b"content-length: %d" % len(content.content), b"", content.content]
        self._socket.sendall(b"\r\n".join(lines))

    def leave(self) -> None:
        self._socket.close()


def test_the_decode_server_is_never_asked(pair: Pair):
    """A prefill whose client leaves while it waits for a decode server."""
    client = Leaving(pair.prefill, pair.paired(BODY))
    until(lambda: used_tokens(pair.prefill) > 0 and in_flight(pair.prefill) == 0)
    client.leave()
    until(pair.is_at_rest)


def test_an_abort_of_a_prefill_that_waits_to_be_taken(pair: Pair):
    answer = pair.pool.submit(post, pair.prefill, "/generate", pair.paired({**BODY, "rid": "a"}))
    until(lambda: used_tokens(pair.prefill) > 0 and in_flight(pair.prefill) == 0)
    abort(pair.prefill, "a")
    assert answer.result().status_code == 500
    assert "aborted on the prefill server" in answer.result().text
    until(pair.is_at_rest)


def test_the_prefill_server_has_never_heard_of_the_room(pair: Pair, tiny_dir: Path):  # noqa: F811
    body = pair.paired(BODY)
    with serving(
        tiny_dir, "prefill", server={"bootstrap_port": free_port(), "handoff_timeout_s": 0.2}
    ) as other:
        with other.client() as client:
            port = client.get("/server_info").json()["bootstrap_port"]
        response = post(pair.decode, "/generate", {**body, "bootstrap_port": port})
    assert response.status_code == 500
    assert "is not known here" in response.text
    until(pair.is_at_rest)


def test_no_decode_server_asks(tiny_dir: Path):  # noqa: F811
    options = {"bootstrap_port": free_port(), "handoff_timeout_s": 0.1}
    with serving(tiny_dir, "prefill", server=options) as one, ThreadPoolExecutor(1) as pool:
        response = post(one, "/generate", Pair(one, one, 1, pool).paired(BODY))
        assert response.status_code == 500
        assert "no decode server asked for it within 0.1 s" in response.text
        until(lambda: used_tokens(one) == 0)


def test_there_is_no_prefill_server(pair: Pair):
    response = post(pair.decode, "/generate", {**pair.paired(BODY), "bootstrap_port": free_port()})
    assert response.status_code == 500
    assert "cannot be reached" in response.text


def test_the_client_of_the_decode_server_leaves_while_it_waits(pair: Pair):
    """The request to the prefill server comes later and finds that nobody wants it."""
    body = pair.paired(BODY)
    client = Leaving(pair.decode, body)
    until(lambda: len(asking(pair)) == 1)
    client.leave()
    until(lambda: not asking(pair))
    response = post(pair.prefill, "/generate", body)
    assert response.status_code == 500
    assert "gave up" in response.text
    assert pair.is_at_rest()


def asking(pair: Pair) -> list[str]:
    """Connections to the bootstrap port, as the system lists them."""
    mark = f":{pair.bootstrap_port:04X} "
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return [line for line in lines if mark in line.split()[1] + " " and line.split()[3] == "01"]


def test_an_abort_of_a_decode_that_waits(pair: Pair):
    body = {**pair.paired(BODY), "rid": "b"}
    answer = pair.pool.submit(post, pair.decode, "/generate", body)
    until(lambda: len(asking(pair)) == 1)
    abort(pair.decode, "b")
    assert answer.result().status_code == 500
    assert "aborted" in answer.result().text
    until(lambda: not asking(pair))


def test_a_cancel_in_the_middle_of_the_answer(pair: Pair):
    both = pair.paired({**BODY, "rid": "c"})
    with pair.decode.client() as client:
        prefill = pair.pool.submit(post, pair.prefill, "/generate", both)
        with client.stream("POST", "/generate", json={**both, "stream": True}) as response:
            assert response.status_code == 200
            next(response.iter_lines())
    assert prefill.result().status_code == 200
    until(pair.is_at_rest)


def test_two_requests_in_one_room(pair: Pair):
    body = pair.paired(BODY)
    first = pair.pool.submit(post, pair.prefill, "/generate", {**body, "rid": "d"})
    until(lambda: used_tokens(pair.prefill) > 0)
    second = post(pair.prefill, "/generate", {**body, "rid": "e"})
    assert second.status_code == 400
    assert "is taken by another request" in second.text
    assert post(pair.decode, "/generate", body).status_code == 200
    assert first.result().status_code == 200
    until(pair.is_at_rest)


def test_pages_of_another_size(pair: Pair, tiny_dir: Path):  # noqa: F811
    with serving(tiny_dir, "decode", page_size=8) as other:
        mixed = Pair(pair.prefill, other, pair.bootstrap_port, pair.pool, rooms=10_000)
        first, second = mixed.post("/generate", BODY)
        assert (first.status_code, second.status_code) == (500, 500)
        for one in (first, second):
            assert "page_size=16" in one.text
        until(mixed.is_at_rest)


def test_more_requests_than_the_pages_hold(pair: Pair):
    """Prompts that are held for others keep the next from running, and fail none."""
    body = {
        "text": "x" * 100,
        "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
    }
    bodies = [pair.paired({**body, "text": f"{index} {'x' * 150}"}) for index in range(12)]
    pool = ThreadPoolExecutor(24)
    with pool:
        prefills = [pool.submit(post, pair.prefill, "/generate", one) for one in bodies]
        until(lambda: used_tokens(pair.prefill) > 600)
        decodes = [pool.submit(post, pair.decode, "/generate", one) for one in bodies]
        answers = [one.result() for one in (*prefills, *decodes)]
    assert {one.status_code for one in answers} == {200}, {
        one.text for one in answers if one.status_code != 200
    }
    until(pair.is_at_rest)
