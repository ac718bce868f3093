"""Who may send how much: windows of both sides, and readers that are slow."""

from __future__ import annotations

import asyncio

import pytest

from phalanx.gateway.http2 import frames
from phalanx.gateway.http2.frames import (
    DATA,
    HEADERS,
    RST_STREAM,
    WINDOW_UPDATE,
    ErrorCode,
    Setting,
)
from tests.gateway.http2.echo import calling, client, echo
from tests.gateway.http2.peer import Peer, message
from tests.gateway.policy_servers import run

SMALL = {"stream_window_bytes": 1000, "window_bytes": 65_535}


async def data_of(peer: Peer, num_bytes: int) -> bytes:
    """So much data, as it comes."""
    data = b""
    while len(data) < num_bytes:
        data += (await peer.next(DATA)).payload
    return data


def test_an_answer_is_sent_as_the_clients_windows_allow():
    async def scenario():
        hello = frames.settings({Setting.INITIAL_WINDOW_SIZE: 10})
        async with echo() as served, client(served, hello) as peer:
            body = bytes(range(256)) * 300
            peer.call(1, body)
            got = await data_of(peer, 10)
            # A ping that is answered: nothing was sent in between.
            peer.send(frames.ping(b"12345678"))
            assert (await peer.next(DATA, frames.PING)).kind == frames.PING
            peer.send(frames.window_update(1, 7))
            got += await data_of(peer, 7)
            # New settings change the window of a stream that is open, also to less than nothing.
            peer.send(frames.settings({Setting.INITIAL_WINDOW_SIZE: 0}))
            peer.send(frames.window_update(1, 5))
            peer.send(frames.ping(b"12345678"))
            assert (await peer.next(DATA, frames.PING)).kind == frames.PING
            peer.send(frames.settings({Setting.INITIAL_WINDOW_SIZE: 1 << 20}))
            # Now it is the connection's window that ends.
            got += await data_of(peer, 65_535 - len(got))
            peer.send(frames.window_update(0, 1 << 20))
            got += await data_of(peer, len(body) + 5 - len(got))
            assert got == message(body)
            assert (await peer.next(HEADERS)).last

    run(scenario())


def test_frames_are_no_larger_than_the_client_takes():
    async def scenario():
        sizes = {Setting.INITIAL_WINDOW_SIZE: 1 << 20, Setting.MAX_FRAME_SIZE: 20_000}
        async with echo() as served, client(served, frames.settings(sizes)) as peer:
            peer.call(1, bytes(50_000))
            seen = [len((await peer.next(DATA)).payload) for _ in range(3)]
            assert seen == [20_000, 20_000, 10_005]

    run(scenario())


def test_a_stream_that_waits_for_its_window_does_not_keep_others_waiting():
    async def scenario():
        hello = frames.settings({Setting.INITIAL_WINDOW_SIZE: 100})
        async with echo() as served, client(served, hello) as peer:
            peer.call(1, bytes(1000))
            assert len((await peer.next(DATA)).payload) == 100
            peer.call(3, b"short")
            assert (await peer.answered(3))[1] == message(b"short")
            peer.send(frames.window_update(1, 1000))
            assert len(await data_of(peer, 905)) == 905

    run(scenario())


def test_a_stream_that_the_client_resets_amid_its_answer_takes_no_room():
    async def scenario():
        hello = frames.settings({Setting.INITIAL_WINDOW_SIZE: 1 << 20})
        async with echo() as served, client(served, hello) as peer:
            peer.call(1, bytes(200_000))
            await data_of(peer, 65_535)
            peer.send(frames.rst_stream(1, ErrorCode.CANCEL))
            peer.call(3, b"next")
            peer.send(frames.window_update(0, 1000))
            assert (await peer.next(DATA)).stream_id == 3

    run(scenario())


@pytest.mark.parametrize(
    ("num_bytes", "window"),
    [(1001, {"stream_window_bytes": 1000}), (65_536, {"window_bytes": 65_535})],
)
def test_more_than_a_window_is_a_fault(num_bytes, window):
    async def scenario():
        async with echo(**window) as served, client(served) as peer:
            peer.call(1, fields=calling("Slow"))
            # The first message is taken, the others wait.
            peer.data(1, message(b""))
            await served.until(taken=1)
            peer.data(1, message(b"") * 200, size=5)
            peer.data(1, message(bytes(num_bytes)))
            assert (await peer.goodbye()).code == ErrorCode.FLOW_CONTROL_ERROR

    run(scenario())


def test_a_handler_that_is_slow_is_sent_no_more_than_a_window():
    async def scenario():
        async with echo(**SMALL) as served, client(served) as peer:
            peer.call(1, fields=calling("Slow"))
            peer.data(1, message(bytes(395)))
            await served.until(taken=1)
            peer.data(1, message(bytes(595)))
            peer.send(frames.ping(b"12345678"))
            assert (await peer.next(WINDOW_UPDATE, frames.PING)).stream_id == 0
            ping = await peer.next(WINDOW_UPDATE, frames.PING)
            assert ping.kind == frames.PING, "nothing was taken of it yet"
            served.release.set()
            credit = await peer.next(WINDOW_UPDATE)
            assert (credit.stream_id, int.from_bytes(credit.payload, "big")) == (1, 1000)

    run(scenario())


def test_a_message_of_many_windows_arrives():
    async def scenario():
        async with echo(**SMALL) as served, client(served) as peer:
            peer.call(1)
            body = message(bytes(range(250)) * 40)
            left, room = body, 1000
            while left:
                peer.data(1, left[:room], last=len(left) <= room)
                left = left[room:]
                while left and (got := await peer.next(WINDOW_UPDATE)).stream_id != 1:
                    pass
                room = int.from_bytes(got.payload, "big") if left else 0
            assert (await peer.answered(1))[1] == body

    run(scenario())


def test_what_was_sent_of_a_stream_that_is_over_opens_the_window_again():
    async def scenario():
        async with echo(window_bytes=65_535) as served, client(served) as peer:
            for stream_id in range(1, 41, 2):
                # Refused before its message, which comes all the same.
                peer.call(stream_id, bytes(10_000), calling("Nothing"))
                await peer.answered(stream_id)
            peer.call(41, b"x")
            assert (await peer.answered(41))[1] == message(b"x")

    run(scenario())


def test_what_nobody_has_taken_of_a_stream_that_was_reset_opens_the_window_again():
    async def scenario():
        async with echo(window_bytes=65_535) as served, client(served) as peer:
            for stream_id in range(1, 41, 2):
                peer.call(stream_id, fields=calling("Slow"))
                peer.data(stream_id, message(b""))
                await served.until(taken=(stream_id + 1) // 2)
                peer.data(stream_id, message(bytes(10_000)))
                peer.send(frames.rst_stream(stream_id, ErrorCode.CANCEL))
            peer.call(41, b"x")
            assert (await peer.answered(41))[1] == message(b"x")

    run(scenario())


def test_a_writer_waits_for_a_client_that_does_not_read():
    async def scenario():
        hello = frames.settings({Setting.INITIAL_WINDOW_SIZE: 250_000})
        async with echo() as served, client(served, hello) as peer:
            peer.send(frames.window_update(0, 1 << 24))
            peer.call(1, b"", calling("Long"))
            await data_of(peer, 250_000)
            assert len(served.taken) == 2, "of the third there was no room for all"
            peer.send(frames.window_update(1, 100_000))
            await served.until(taken=3)
            peer.send(frames.rst_stream(1, ErrorCode.CANCEL))
            peer.call(3, b"x")
            while (await peer.next(HEADERS)).stream_id != 3:
                pass
            assert len(served.taken) == 3

    run(scenario())


def test_a_call_that_is_refused_early_is_told_to_send_no_more():
    async def scenario():
        async with echo(max_message_bytes=1000) as served, client(served) as peer:
            peer.call(1)
            peer.data(1, b"\0\0\0\x10\0")
            fields, _ = await peer.answered(1)
            assert fields[b"grpc-status"] == b"8"
            assert b"the message has 4096 bytes; at most 1000" in fields[b"grpc-message"]
            reset = await peer.next(RST_STREAM)
            assert int.from_bytes(reset.payload, "big") == ErrorCode.NO_ERROR

    run(scenario())


def test_many_large_answers_share_a_connection():
    async def scenario():
        sizes = {Setting.INITIAL_WINDOW_SIZE: 1 << 20}
        async with echo() as served, client(served, frames.settings(sizes)) as peer:
            peer.send(frames.window_update(0, 1 << 24))
            ids = range(1, 17, 2)
            for stream_id in ids:
                peer.call(stream_id, bytes((stream_id,)) * 300_000)
            found = dict.fromkeys(ids, b"")
            ended = 0
            while ended < len(ids):
                got = await peer.next(DATA, HEADERS)
                if got.kind == DATA:
                    found[got.stream_id] += got.payload
                ended += got.last
            assert found == {each: message(bytes((each,)) * 300_000) for each in ids}

    run(scenario())


def test_a_client_that_is_gone_ends_what_runs_for_it():
    async def scenario():
        async with echo() as served:
            async with client(served) as peer:
                for stream_id in (1, 3):
                    peer.call(stream_id, b"x", calling("Hold"))
                await served.until(held=2)
            await served.until(left=2)
            await asyncio.sleep(0)

    run(scenario())
