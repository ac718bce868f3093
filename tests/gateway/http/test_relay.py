from __future__ import annotations

import asyncio
import json

import pytest

from phalanx.routing.snapshot import ServerState
from tests.gateway.http.running import (
    Servers,
    answering,
    backend,
    gateway,
    read_request,
    relayed,
    request,
    run,
)

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-own: 1\r\n\r\nok"


def test_a_request_and_its_response_pass_byte_for_byte():
    seen = []

    async def script(reader, writer):
        seen.append(await read_request(reader))
        writer.write(OK)

    async def scenario():
        async with relayed(script) as (front, _):
            body = b'{"model" : "m",  "x":1.50}'
            answer = await front.ask(
                request(
                    path="/v1/a%20b?q=%41",
                    body=body,
                    content_type="application/json",
                    connection="keep-alive, x-mine",
                    x_mine="dropped",
                    te="trailers",
                    x_request_id="abc",
                )
            )
            assert answer.status == 200 and answer.body == b"ok"
            assert answer.headers["x-own"] == "1" and answer.headers["x-request-id"] == "abc"
            head, got = seen[0]
            assert got == body
            lines = head.split(b"\r\n")
            assert lines[0] == b"POST /v1/a%20b?q=%41 HTTP/1.1"
            assert b"x-request-id: abc" in lines and b"via: 1.1 phalanx" in lines
            assert not any(line.startswith((b"x-mine", b"te:", b"connection")) for line in lines)
            assert front.servers.in_flight == 0

    run(scenario())


def test_a_length_that_is_said_to_be_for_one_hop_reaches_no_server():
    """Without its length the body would be the next request of that connection."""
    seen = []

    async def script(reader, writer):
        seen.append(await reader.read())

    async def scenario():
        async with relayed(script) as (front, _):
            inner = b"GET /v1/other HTTP/1.1\r\nhost: m\r\n\r\n"
            answer = await front.ask(request(body=inner, connection="content-length"))
            assert answer.status == 400 and b"`content-length`" in answer.body
        assert seen == []

    run(scenario())


@pytest.mark.parametrize(
    "lines", [b"connection: close, content-length", b"connection: x\r\nconnection: content-type"]
)
def test_a_response_whose_length_is_said_to_be_for_one_hop_is_none(lines):
    async def scenario():
        async with relayed(answering(OK.replace(b"x-own: 1", lines))) as (front, _):
            answer = await front.ask(request())
            assert answer.status == 502 and b"a `connection` that names" in answer.body

    run(scenario())


def test_json_that_is_nested_too_deeply_to_name_its_model_is_refused():
    async def scenario():
        deep = b'{"model":"m","a":' + b"[" * 99_000 + b"]" * 99_000 + b"}"
        async with relayed(answering(OK)) as (front, _):
            answer = await front.ask(request(body=deep, content_type="application/json"))
            assert answer.status == 400 and b"x-phalanx-model" in answer.body
            named = request(body=deep, content_type="application/json", x_phalanx_model="m")
            assert (await front.ask(named)).body == b"ok"

    run(scenario())


def test_connections_are_used_again_on_both_sides():
    async def scenario():
        async with relayed(answering(OK)) as (front, server):
            client = await front.connect()
            for _ in range(5):
                client.write(request(body=b"x"))
                assert (await client.answer()).body == b"ok"
            client.close()
            assert server.connections == 1

    run(scenario())


def test_pipelined_requests_are_answered_in_order():
    async def script(reader, writer):
        while True:
            _, body = await read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)

    async def scenario():
        async with relayed(script) as (front, _):
            client = await front.connect()
            bodies = [b"%d" % number * (number + 1) for number in range(8)]
            client.write(b"".join(request(body=body) for body in bodies))
            assert [(await client.answer()).body for _ in bodies] == bodies
            client.close()

    run(scenario())


def test_a_dead_server_is_marked_and_another_gets_the_request():
    async def scenario():
        async with backend(answering(OK)) as dead:
            pass
        async with backend(answering(OK)) as alive:
            servers = Servers(m=(dead.port, alive.port))
            async with gateway(servers) as front:
                for _ in range(4):
                    assert (await front.ask(request(body=b"x"))).status == 200
                assert servers.state(dead.port) is ServerState.UNHEALTHY
                assert servers.in_flight == 0

    run(scenario())


def test_without_any_server_503_says_when_to_come_back():
    async def scenario():
        async with backend(answering(OK)) as dead:
            pass
        servers = Servers(m=(dead.port,))
        async with gateway(servers) as front:
            for _ in range(2):
                answer = await front.ask(request(path="/v1/x", body=b"x"))
                assert answer.status == 503 and int(answer.headers["retry-after"]) >= 1
                assert json.loads(answer.body)["error"]["code"] == "no_server"
            assert servers.in_flight == 0

    run(scenario())


def test_large_bodies_pass_both_ways():
    async def script(reader, writer):
        while True:
            _, body = await read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()

    async def scenario():
        body = bytes(range(256)) * 12_000
        async with relayed(script) as (front, server):
            client = await front.connect()
            for _ in range(3):
                client.write(request(body=body, content_type="application/octet-stream"))
                answer = await client.answer()
                assert answer.body == body
            client.close()
            assert server.connections == 1

    run(scenario())


def test_a_chunked_request_ends_once_though_the_next_one_comes_early():
    came, answer = asyncio.Event(), asyncio.Event()
    seen = []

    async def script(reader, writer):
        for _ in range(2):
            seen.append((await read_request(reader))[1])
            came.set()
            await answer.wait()
            writer.write(OK)

    async def scenario():
        async with relayed(script) as (front, one):
            client = await front.connect()
            client.write(
                b"POST /v1/x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
                b"5\r\nhello\r\n0\r\n\r\n"
            )
            await came.wait()
            client.write(request(body=b"second"))
            # Once this is answered, the bytes of the second request were read.
            assert (await front.ask(b"CONNECT / HTTP/1.1\r\nhost: a\r\n\r\n")).status == 405
            answer.set()
            assert [(await client.answer()).status for _ in range(2)] == [200, 200]
            assert one.connections == 1

    run(scenario())
    assert seen == [b"hello", b"second"]
