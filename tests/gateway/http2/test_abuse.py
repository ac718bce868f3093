"""Clients that want to cost the gateway more than they pay: each is bounded, and turned away."""

from __future__ import annotations

import asyncio
import itertools
import socket

import pytest

from phalanx.gateway.http2 import frames
from phalanx.gateway.http2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PRIORITY,
    SETTINGS,
    ErrorCode,
    Setting,
)
from phalanx.gateway.http2.header_blocks import written
from tests.gateway.http2.echo import calling, client, echo
from tests.gateway.http2.peer import FIELDS, Peer, message
from tests.gateway.policy_servers import HOST, run

CALM = ErrorCode.ENHANCE_YOUR_CALM
FEW = {"wasted_burst": 20, "wasted_per_s": 1e-9}


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream_id: int = 0) -> bytes:
    return frames.head(kind, flags, stream_id, len(payload)) + payload


def rapid_reset(number: int) -> bytes:
    """CVE-2023-44487: a stream that is opened and taken back."""
    stream_id = 2 * number + 1
    opened = frames.headers(stream_id, written(calling("Hold")), 16384)
    return opened + frames.rst_stream(stream_id, ErrorCode.CANCEL)


def made_you_reset(number: int) -> bytes:
    """CVE-2025-8671: a stream that the client makes the server reset."""
    stream_id = 2 * number + 1
    opened = frames.headers(stream_id, written(calling("Hold")), 16384)
    return opened + frames.window_update(stream_id, 0)


def empty_data(number: int) -> bytes:
    """CVE-2019-9518."""
    opened = frames.headers(1, written(calling("Hold")), 16384) if number == 0 else b""
    return opened + frame(DATA, b"", 0, 1)


@pytest.mark.parametrize(
    "one",
    [
        rapid_reset,
        made_you_reset,
        empty_data,
        lambda number: frame(PING, bytes(8)),
        lambda number: frame(SETTINGS),
        lambda number: frame(PRIORITY, bytes(5), 0, 1),
        lambda number: frame(200, b"x"),
    ],
    ids=["rapid reset", "made you reset", "empty data", "ping", "settings", "priority", "unknown"],
)
def test_what_costs_and_brings_nothing_is_bounded(one):
    async def scenario():
        async with echo(**FEW) as served, client(served) as peer:
            for number in range(15):
                peer.send(one(number))
            peer.call(1001, b"honest")
            assert (await peer.answered(1001))[1] == message(b"honest")
            for number in range(600, 620):
                peer.send(one(number))
            assert (await peer.goodbye()).code == CALM
            assert served.held == served.left

    run(scenario())


def test_the_allowance_comes_back_with_time():
    async def scenario():
        async with echo(wasted_burst=100, wasted_per_s=1e6) as served, client(served) as peer:
            for _ in range(300):
                peer.send(frame(PING, bytes(8)))
                await peer.next(PING)

    run(scenario())


def test_a_flood_of_continuations_ends():
    """CVE-2024-27316 and its like: a header block without an end."""

    async def scenario():
        async with echo() as served, client(served) as peer:
            peer.send(frame(HEADERS, written(FIELDS), 0, 1))
            for _ in range(40):
                peer.send(frame(CONTINUATION, b"", 0, 1))
            assert (await peer.goodbye()).code == CALM
        async with echo(max_header_bytes=20_000) as served, client(served) as peer:
            peer.send(frame(HEADERS, bytes(16_000), 0, 1))
            peer.send(frame(CONTINUATION, bytes(16_000), 0, 1))
            assert (await peer.goodbye()).code == CALM

    run(scenario())


def test_header_blocks_are_bounded_in_what_they_say():
    """A short block says much by leaning on the table, or by many small fields."""

    async def scenario():
        large = written(((b"x-large", b"a" * 3000),))
        indexed = b"\x40" + large[1:] + b"\xbe" * 40
        for block, code in (
            (written(FIELDS) + indexed, ErrorCode.COMPRESSION_ERROR),
            (written((*FIELDS, *((b"x", b"y"),) * 200)), CALM),
            (written(FIELDS) + b"\x82" * 2000, ErrorCode.COMPRESSION_ERROR),
        ):
            async with echo() as served, client(served) as peer:
                peer.send(frame(HEADERS, block, END_HEADERS, 1))
                assert (await peer.goodbye()).code == code

    run(scenario())


def test_streams_beyond_those_allowed_are_refused_and_not_many_of_them():
    async def scenario():
        async with echo(max_streams=2, **FEW) as served, client(served) as peer:
            for stream_id in (1, 3, 5):
                peer.call(stream_id, b"x", calling("Hold"))
            assert await peer.reset_of(5) == ErrorCode.REFUSED_STREAM
            assert served.held == 2
            served.release.set()
            await peer.answered(3)
            peer.call(7, b"x")
            await peer.answered(7)
            served.release.clear()
            for stream_id in (9, 11):
                peer.call(stream_id, b"x", calling("Hold"))
            await served.until(held=4)
            for stream_id in range(13, 109, 2):
                peer.call(stream_id, b"x", calling("Hold"))
            assert (await peer.goodbye()).code == CALM
            await served.until(left=2)

    run(scenario())


def test_a_client_that_measures_the_line_with_pings_is_served():
    """As those of Go do: one for each frame of data that they get."""

    async def scenario():
        async with echo(**FEW) as served, client(served) as peer:
            for number in range(50):
                peer.call(2 * number + 1, b"x")
                await peer.answered(2 * number + 1)
                peer.send(frame(PING, bytes(8)))
                await peer.next(PING)

    run(scenario())


def refused_call(number: int) -> bytes:
    return frames.headers(2 * number + 1, written(calling("No" * 100)), 16384, last=True)


@pytest.mark.parametrize("ask", [lambda number: frame(PING, bytes(8)), refused_call])
def test_a_client_that_asks_and_does_not_read_is_given_up(ask):
    async def scenario():
        limits = {"wasted_burst": 10**9, "max_written_bytes": 100_000, "linger_s": 0.02}
        async with echo(**limits) as served:
            deaf = socket.socket()
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(deaf, (HOST, served.port))
            await loop.sock_sendall(deaf, frames.PREFACE + frame(SETTINGS))
            numbers = itertools.count()
            with pytest.raises(ConnectionError):
                while True:
                    asked = b"".join(map(ask, itertools.islice(numbers, 1000)))
                    await loop.sock_sendall(deaf, asked)
            deaf.close()

    run(scenario())


def test_a_client_that_says_nothing_is_not_waited_for():
    async def scenario():
        async with echo(greeting_timeout_s=0.02) as served:
            for hello in (b"", frames.PREFACE, frames.PREFACE[:7]):
                peer = Peer(*await asyncio.open_connection(HOST, served.port))
                peer.send(hello)
                await peer.ended()
                await peer.close()

    run(scenario())


def test_a_message_in_single_bytes_holds_little_more_than_itself():
    async def scenario():
        async with echo() as served, client(served) as peer:
            body = message(bytes(range(256)) * 20)
            peer.call(1)
            peer.data(1, body, last=True, size=1)
            assert (await peer.answered(1))[1] == body

    run(scenario())


def test_half_a_message_is_no_message():
    async def scenario():
        async with echo() as served, client(served) as peer:
            for number, data in enumerate((b"\0", b"\0\0\0\0\x05abc", b"\x02\0\0\0\x01a")):
                stream_id = 2 * number + 1
                peer.send(frames.headers(stream_id, written(FIELDS), 16384))
                peer.send(frame(DATA, data, END_STREAM, stream_id))
                fields, _ = await peer.answered(stream_id)
                assert fields[b"grpc-status"] == b"3", fields

    run(scenario())


def test_a_defect_of_a_handler_tells_the_caller_nothing_of_it(caplog):
    async def scenario():
        async with echo() as served, client(served) as peer:
            peer.call(1, b"x", calling("Fail"))
            fields, _ = await peer.answered(1)
            assert fields[b"grpc-status"] == b"13"
            assert fields[b"grpc-message"] == b"the gateway failed; its log tells why"

    run(scenario())
    assert "a defect" in caplog.text


def test_a_message_that_stops_arriving_keeps_no_place():
    async def scenario():
        async with echo(max_calls=1, body_timeout_s=0.02) as served, client(served) as peer:
            peer.call(1)
            peer.data(1, message(b"half of it")[:9])
            fields, _ = await peer.answered(1)
            assert fields[b"grpc-status"] == b"4"
            assert fields[b"grpc-message"] == b"nothing of the message has come for 0.02 s"
            peer.call(3, b"x")
            assert (await peer.answered(3))[1] == message(b"x")

    run(scenario())


def test_an_answer_that_nobody_takes_is_given_up():
    async def scenario():
        hello = frames.settings({Setting.INITIAL_WINDOW_SIZE: 10})
        async with echo(stall_timeout_s=0.02) as served, client(served, hello) as peer:
            peer.call(1, bytes(1000))
            peer.call(3, b"", calling("Long"))
            assert await peer.reset_of(1) == ErrorCode.CANCEL
            peer.call(5, b"tiny")
            assert (await peer.answered(5))[1] == message(b"tiny")
            assert not served.taken

    run(scenario())
