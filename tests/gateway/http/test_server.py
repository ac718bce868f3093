"""What the HTTP server refuses, answers by handlers, and upgrades."""

from __future__ import annotations

import asyncio
import json

import pytest

from phalanx.errors import InvalidRequestError, NoServerError
from phalanx.gateway.http.limits import HttpLimits
from phalanx.gateway.http.message import HttpResponse
from phalanx.gateway.http.router import Access, Router
from tests.gateway.http.running import (
    OK,
    Servers,
    answering,
    ask,
    backend,
    gateway,
    read_request,
    relayed,
    request,
    run,
)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
        (b"GET /v1/../admin HTTP/1.1\r\nhost: a\r\n\r\n", 400),
        (b"GET /v1/%2e%2E/admin HTTP/1.1\r\nhost: a\r\n\r\n", 400),
        (
            b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0",
            400,
        ),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab", 400),
        (
            b"POST / HTTP/1.1\r\nhost: a\r\nconnection: content-length\r\ncontent-length: 1\r\n\r\na",
            400,
        ),
        (b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close, Host\r\n\r\n", 400),
        (
            b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\nconnection: authorization\r\n\r\n",
            400,
        ),
        (b"GET / HTTP/1.1\r\nhost: a\r\nconnection: content-type\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nconnection: keep-alive,x-phalanx-model\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nhost: a\r\nexpect: magic\r\ncontent-length: 0\r\n\r\n", 417),
        (b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 70_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * 200 + b"\r\n", 431),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2000\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1001\r\n\r\n" + b"z" * 1001, 413),
        (
            b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n800\r\n"
            + b"z" * 2048,
            413,
        ),
    ],
)
def test_what_is_refused_is_refused_in_words(data, status):
    (answer,) = ask(data, limits=HttpLimits(max_body_bytes=1000))
    assert answer.status == status
    assert json.loads(answer.body)["error"]["message"]
    assert answer.headers["x-request-id"]


def test_a_client_that_still_sends_is_not_cut_off():
    async def scenario():
        limits = HttpLimits(max_body_bytes=1000)
        async with relayed(answering(OK), limits=limits) as (front, one):
            client = await front.connect()
            client.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9000000\r\n\r\n")
            answer = await client.answer()
            assert answer.status == 413 and answer.headers["connection"] == "close"
            for _ in range(20):
                client.write(bytes(2**18))
                await client.writer.drain()
            client.writer.write_eof()
            await front.server.close(drain_s=30.0)
            assert one.connections == 0

    run(scenario())


def test_the_key_is_asked_for_and_not_passed_on():
    seen = []

    async def script(reader, writer):
        while True:
            seen.append((await read_request(reader))[0])
            writer.write(OK)

    good = request(body=b"x", authorization="Bearer secret")
    bad, none = request(body=b"x", authorization="Bearer wrong"), request(body=b"x")
    answers = ask(good, bad, none, good, script=script, api_key="secret")
    assert [answer.status for answer in answers] == [200, 401, 401, 200]
    assert answers[1].headers["www-authenticate"] == "Bearer"
    assert len(seen) == 2 and not any(b"secret" in head for head in seen)
    ask(good, script=script, api_key="secret", passes_authorization=True)
    assert b"authorization: bearer secret" in seen[-1].lower()


def test_the_admin_key_opens_all_and_the_other_one_only_inference():
    async def handler(given):
        return HttpResponse.json(200, {})

    async def scenario():
        router = Router()
        router.add("GET", "/admin", handler, access=Access.ADMIN)
        router.add("GET", "/open", handler, access=Access.OPEN)
        router.add("GET", "/infer", handler)
        async with gateway(Servers(), router, api_key="k", admin_key="a") as front:
            statuses = {}
            for path in ("/admin", "/open", "/infer"):
                for key in ("k", "a", "x"):
                    data = request("GET", path, authorization=f"Bearer {key}")
                    statuses[path, key] = (await front.ask(data)).status
        assert statuses == {
            ("/admin", "k"): 401,
            ("/admin", "a"): 200,
            ("/admin", "x"): 401,
            ("/open", "k"): 200,
            ("/open", "a"): 200,
            ("/open", "x"): 200,
            ("/infer", "k"): 200,
            ("/infer", "a"): 200,
            ("/infer", "x"): 401,
        }

    run(scenario())


def test_the_model_is_found_in_the_head_or_the_body():
    def naming(body: bytes, **headers: str) -> bytes:
        headers.setdefault("content_type", "application/json")
        return request(body=body, **headers)

    async def scenario():
        async with backend(answering(OK)) as one, backend(answering(OK)) as two:
            async with gateway(Servers(a=(one.port,), b=(two.port,))) as front:
                expected = [
                    (naming(b'{"model": "a"}'), 200),
                    (naming(b'{"model_name": "b"}', content_type="Application/JSON; x=y"), 200),
                    (naming(b'{"model": "a"}', x_phalanx_model="b"), 200),
                    (request(body=b"raw", x_phalanx_model="a"), 200),
                    (naming(b'{"model": "c"}'), 404),
                    (naming(b'{"model": 5}'), 400),
                    (naming(b'{"model": NaN'), 404),
                    (request(body=b"raw"), 404),
                ]
                for data, status in expected:
                    answer = await front.ask(data)
                    assert answer.status == status, data
                    if status == 404:
                        assert b"'a', 'b'" in answer.body
                assert (one.connections, two.connections) == (1, 1)
            async with gateway(Servers(a=(one.port,), b=(two.port,)), default_model="b") as front:
                assert (await front.ask(request(body=b"raw"))).status == 200
                assert (one.connections, two.connections) == (1, 2)

    run(scenario())


def test_a_client_is_asked_to_continue():
    async def scenario():
        async with relayed(answering(OK)) as (front, _):
            client = await front.connect()
            head = "POST /v1/x HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n"
            client.write(head.encode())
            assert (await client.answer()).status == 100
            client.write(b"abc")
            assert (await client.answer()).body == b"ok"

    run(scenario())


def test_responses_without_a_body_and_interim_ones():
    async def script(reader, writer):
        while True:
            head, _ = await read_request(reader)
            if head.startswith(b"HEAD"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")
            elif head.startswith(b"DELETE"):
                writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
            else:
                writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK)

    async def scenario():
        async with relayed(script) as (front, one):
            client = await front.connect()
            for _ in range(2):
                client.write(request("HEAD"))
                answer = await client.answer(without_body=True)
                assert answer.status == 200 and answer.headers["content-length"] == "5"
                client.write(request("DELETE"))
                assert (await client.answer()).status == 204
                client.write(request("GET"))
                assert (await client.answer()).status == 103
                assert (await client.answer()).body == b"ok"
            assert one.connections == 1

    run(scenario())


def test_http_1_0_gets_its_response_to_the_end_of_the_connection():
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
    old, kept = ask(
        b"GET / HTTP/1.0\r\n\r\n",
        b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n",
        script=answering(chunked),
    )
    assert old.body == kept.body == b"abc"
    assert "transfer-encoding" not in old.headers and kept.headers["connection"] == "close"


def test_a_response_without_a_length_goes_on_in_chunks():
    async def script(reader, writer):
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nabc")
        await writer.drain()

    (answer,) = ask(request(body=b"x"), script=script)
    assert answer.headers["transfer-encoding"] == "chunked" and answer.body == b"abc"


def test_handlers_answer_and_their_failures_are_worded():
    seen = []

    async def echo(given):
        seen.append(given)
        return HttpResponse.json(200, {"body": given.body.decode(), **given.params, **given.query})

    async def refuse(given):
        raise InvalidRequestError("no such thing")

    async def unready(given):
        raise NoServerError("nobody", retry_after_s=7)

    async def fail(given):
        raise RuntimeError("secret detail")

    async def scenario():
        router = Router()
        router.add("POST", "/things/{name}", echo)
        router.add("GET", "/refuse", refuse)
        router.add("GET", "/unready", unready)
        router.add("GET", "/fail", fail)
        async with gateway(Servers(), router) as front:
            answer = await front.ask(
                request(path="/things/a%2Fb?x=1", body=b"hi", x_request_id="7")
            )
            assert json.loads(answer.body) == {"body": "hi", "name": "a/b", "x": "1"}
            assert answer.headers["content-type"] == "application/json"
            assert seen[0].request_id == answer.headers["x-request-id"] == "7"
            assert (await front.ask(request("GET", "/refuse"))).status == 400
            unready_answer = await front.ask(request("GET", "/unready"))
            assert unready_answer.status == 503
            assert unready_answer.headers["retry-after"] == "7"
            failed = await front.ask(request("GET", "/fail"))
            assert failed.status == 500 and b"secret" not in failed.body

    run(scenario())


def test_a_handler_is_cancelled_when_its_client_leaves():
    begun, ended = asyncio.Event(), asyncio.Event()

    async def handler(given):
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            assert given.disconnected.is_set()
            ended.set()

    async def scenario():
        router = Router()
        router.add("GET", "/wait", handler)
        async with gateway(Servers(), router) as front:
            client = await front.connect()
            client.write(request("GET", "/wait"))
            await begun.wait()
            client.close()
            await ended.wait()

    run(scenario())


def test_closing_lets_what_is_being_answered_end():
    go = asyncio.Event()
    begun = asyncio.Event()

    async def script(reader, writer):
        await read_request(reader)
        begun.set()
        await go.wait()
        writer.write(OK)
        await writer.drain()

    async def scenario():
        async with relayed(script) as (front, _):
            client, idle = await front.connect(), await front.connect()
            client.write(request(body=b"x"))
            await begun.wait()
            closing = asyncio.ensure_future(front.server.close(drain_s=30.0))
            assert await idle.ended()
            go.set()
            answer = await client.answer()
            assert answer.body == b"ok" and answer.headers["connection"] == "close"
            await closing
            with pytest.raises(OSError):
                await front.connect()

    run(scenario())
