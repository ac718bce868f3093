"""A connection that is dropped at any byte: the ticket is released, nothing hangs, and the ending
is one that the client can tell from a whole answer.
"""

from __future__ import annotations

import asyncio
import socket

import pytest

from phalanx.gateway.http.limits import HttpLimits
from phalanx.gateway.http.upstream_pool import UpstreamPool
from phalanx.gateway.http.way import Place
from tests.gateway.http.running import (
    HOST,
    Servers,
    answering,
    backend,
    gateway,
    read_request,
    relayed,
    request,
    run,
)

LENGTH = b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\nx-a: b\r\n\r\nabcdefgh"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n5\r\ndefgh\r\n0\r\n\r\n"
)
EVENTS = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    b"b\r\ndata: one\n\n\r\nb\r\ndata: two\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
)
JSON = request(body=b'{"model": "m", "x": 1}', content_type="application/json")
BINARY = request(body=b"0123456789" * 3, content_type="application/octet-stream")
CHUNKED_REQUEST = (
    b"POST /v1/x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n1\r\n!\r\n0\r\n\r\n"
)


@pytest.mark.parametrize("data", [JSON, BINARY, CHUNKED_REQUEST])
def test_a_client_that_leaves_at_any_byte_of_its_request(data):
    async def scenario():
        async with relayed(answering(LENGTH)) as (front, one):
            for end in range(len(data)):
                client = await front.connect()
                client.write(data[:end])
                await client.writer.drain()
                client.close()
                await client.writer.wait_closed()
            await front.server.close(drain_s=30.0)
            assert front.servers.in_flight == 0
            assert front.server.statistics.num_answering == 0
            assert one.connections <= len(data)

    run(scenario())


def test_a_request_cut_at_any_byte_arrives_whole():
    async def scenario():
        seen = []

        async def script(reader, writer):
            while True:
                seen.append((await read_request(reader))[1])
                writer.write(LENGTH)

        async with relayed(script) as (front, _):
            client = await front.connect()
            for data, body in ((JSON, b'{"model": "m", "x": 1}'), (CHUNKED_REQUEST, b"hello!")):
                for cut in range(1, len(data)):
                    client.write(data[:cut])
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                    client.write(data[cut:])
                    assert (await client.answer()).body == b"abcdefgh"
                    assert seen.pop() == body and not seen
            client.close()

    run(scenario())


def cut_off(response: bytes, end: int):
    async def script(reader, writer):
        await read_request(reader)
        writer.write(response[:end])
        await writer.drain()

    return script


def in_turn(scripts):
    """Each connection is served by the next script."""
    left = iter(scripts)

    async def script(reader, writer):
        await next(left)(reader, writer)

    return script


@pytest.mark.parametrize("response", [LENGTH, CHUNKED, EVENTS])
def test_a_server_that_breaks_off_at_any_byte_of_its_response(response):
    head = response.index(b"\r\n\r\n") + 4
    scripts = in_turn(cut_off(response, end) for end in range(len(response) + 1))

    async def scenario():
        async with relayed(scripts) as (front, one):
            for end in range(len(response) + 1):
                answer = await front.ask(JSON)
                if end < head:
                    assert answer.status == 502 and b"not sent again" in answer.body
                elif end == len(response):
                    assert answer.status == 200 and answer.whole
                elif response is EVENTS:
                    check_events(answer, response[:end])
                else:
                    assert answer.status == 200 and not answer.whole
                await front.servers.left(end + 1)
            assert one.connections == len(response) + 1

    run(scenario())


def check_events(answer, sent: bytes) -> None:
    """Whole events, then one that tells of the break, then the end of the stream."""
    assert answer.status == 200 and answer.whole
    events = answer.body.split(b"\n\n")
    assert events.pop() == b"" and events[-1] == b"data: [DONE]"
    num_whole = sum(sent.count(event) for event in (b"data: one\n\n", b"data: two\n\n"))
    assert events[:num_whole] == [b"data: one", b"data: two"][:num_whole]
    if b"[DONE]\n\n" not in sent:
        assert b"broke off" in events[-2] and len(events) == num_whole + 2


def test_a_client_that_leaves_while_it_is_answered_stops_the_server():
    begun = asyncio.Event()

    async def script(reader, writer):
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
        begun.set()
        await reader.read()  # until the gateway has gone

    async def scenario():
        async with relayed(script) as (front, one):
            client = await front.connect()
            client.write(BINARY)
            await begun.wait()
            await client.reader.readuntil(b"\r\n\r\n")
            client.close()
            await one.closed.wait()
            await front.servers.left(1)
            assert front.server.statistics.counts()["relay"].by_status == {499: 1}

    run(scenario())


def test_a_client_that_leaves_while_it_waits_stops_the_server():
    got = asyncio.Event()

    async def script(reader, writer):
        await read_request(reader)
        got.set()
        await reader.read()

    async def scenario():
        async with relayed(script) as (front, one):
            client = await front.connect()
            client.write(JSON)
            await got.wait()
            client.close()
            await one.closed.wait()
            await front.servers.left(1)

    run(scenario())


def test_a_slow_reader_holds_the_server_back():
    size = 64 * 2**20
    finished = asyncio.Event()

    async def script(reader, writer):
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(size // 2**20):
            writer.write(bytes(2**20))
            await writer.drain()
        finished.set()

    async def scenario():
        async with relayed(script) as (front, _):
            client = await front.connect()
            client.write(JSON)
            await client.reader.readuntil(b"\r\n\r\n")
            for _ in range(2000):
                await asyncio.sleep(0)
            assert not finished.is_set()
            got = 0
            while got < size:
                got += len(await client.reader.read(2**20))
            await front.servers.left(1)
            client.close()

    run(scenario())


def test_a_server_that_says_nothing_is_504():
    async def script(reader, writer):
        await reader.read()

    async def scenario():
        limits = HttpLimits(response_timeout_s=0.05)
        async with relayed(script, limits=limits) as (front, one):
            answer = await front.ask(JSON)
            assert answer.status == 504 and b"0.05 s" in answer.body
            await front.servers.left(1)
            await one.closed.wait()

    run(scenario())


def test_a_head_that_comes_in_drops_is_given_up():
    async def scenario():
        limits = HttpLimits(head_timeout_s=0.1)
        async with relayed(answering(LENGTH), limits=limits) as (front, one):
            client = await front.connect()
            client.write(b"GET / HT")
            answer = await client.answer()
            assert answer.status == 408 and answer.headers["connection"] == "close"
            assert await client.ended()
            silent = await front.connect()
            assert await silent.ended()
            assert one.connections == 0

    run(scenario())


def test_a_connection_that_the_server_closed_while_idle_is_not_used():
    async def script(reader, writer):
        await read_request(reader)
        writer.write(LENGTH)
        await writer.drain()

    async def scenario():
        async with relayed(script) as (front, one):
            client = await front.connect()
            for _ in range(3):
                client.write(JSON)
                assert (await client.answer()).status == 200
                await one.closed.wait()
                one.closed.clear()
                for _ in range(20):
                    await asyncio.sleep(0)
            assert one.connections == 3
            client.close()

    run(scenario())


def test_two_dead_servers_are_all_that_is_tried():
    async def scenario():
        async with backend(answering(LENGTH)) as a, backend(answering(LENGTH)) as b:
            pass
        async with backend(answering(LENGTH)) as c:
            servers = Servers(m=(a.port, b.port, c.port))
            async with gateway(servers) as front:
                first = await front.ask(JSON)
                assert first.status == 503 and b"was not started" in first.body
                assert (await front.ask(JSON)).status == 200
                assert servers.in_flight == 0

    run(scenario())


def test_a_rested_connection_is_looked_at_before_it_is_used():
    async def scenario():
        pool = UpstreamPool(HttpLimits(upstream_fresh_s=1e-9))
        with socket.create_server((HOST, 0)) as listener:
            place = Place("one", HOST, listener.getsockname()[1], "the server")
            upstream = await pool.connect(place)
            accepted, _ = listener.accept()
            with accepted:
                pool.put(upstream)
                await asyncio.sleep(0.002)  # the loop's clock counts milliseconds
                assert pool.idle(place.key) is upstream
                pool.put(upstream)
                await asyncio.sleep(0.002)  # the loop's clock counts milliseconds
            # The loop has not turned since: nothing but a look can tell.
            assert pool.idle(place.key) is None

    run(scenario())


def test_a_connection_with_half_a_request_on_it_is_not_used_again():
    async def script(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(LENGTH)
        await reader.read()

    async def scenario():
        async with relayed(script) as (front, one):
            client = await front.connect()
            client.write(b"POST /v1/x HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\nabc")
            answer = await client.answer()
            assert answer.status == 200 and answer.headers["connection"] == "close"
            (server_id,) = front.servers.ids.values()
            assert front.relay.upstreams.idle(server_id) is None
            await one.closed.wait()
            await front.servers.left(1)

    run(scenario())


def test_a_body_that_grows_too_large_on_its_way_is_refused():
    got = asyncio.Event()

    async def script(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(8)
        got.set()
        await reader.read()

    async def scenario():
        async with relayed(script, limits=HttpLimits(max_body_bytes=8)) as (front, one):
            client = await front.connect()
            head = b"POST /v1/x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
            client.write(head + b"4\r\nabcd\r\n")
            await got.wait()
            client.write(b"5\r\nefghi\r\n")
            assert (await client.answer()).status == 413
            await one.closed.wait()
            await front.servers.left(1)

    run(scenario())
