"""Connections to model servers: shared, tried anew after a failure, closed when the server is gone."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from phalanx.gateway.grpc.channels import Channels
from phalanx.gateway.grpc.upstream import NotConnectedError
from phalanx.gateway.http2 import frames
from phalanx.gateway.http2.frames import ErrorCode
from phalanx.gateway.http2.header_blocks import written
from phalanx.routing.endpoint import Endpoint, Scheme
from phalanx.wire.robot_inference import NOT_STARTED
from tests.gateway.grpc.scripted import ask, failed, scripted, silent
from tests.gateway.http2.peer import Peer
from tests.gateway.policy_servers import FakePolicyServer, answer_to, request, run

Code = grpc.StatusCode
HEAD = written(((b":status", b"200"), (b"content-type", b"application/grpc")))


def test_the_connection_of_a_server_that_is_gone_is_closed():
    async def scenario():
        second = FakePolicyServer()
        async with scripted() as (_, first, peers):
            live = {first}
            channels = Channels(lambda: frozenset(live))
            asking = asyncio.ensure_future(ask(channels, first))
            peer = await peers.get()
            peer.answer(await peer.request(), answer_to(request()))
            await asking
            asking = asyncio.ensure_future(ask(channels, first))
            peer.answer(await peer.request(), answer_to(request()))
            await asking
            live.clear()
            live.add(await second.start())
            await ask(channels, second.endpoint)
            await peer.ended()
            await channels.close()
        await second.stop()

    run(scenario())


def test_a_call_that_runs_keeps_the_connection_of_a_server_that_is_gone():
    async def scenario():
        first, second = FakePolicyServer(), FakePolicyServer()
        first.behave = first.hold
        live = {await first.start()}
        channels = Channels(lambda: frozenset(live))
        running = asyncio.ensure_future(ask(channels, first.endpoint))
        await first.arrived()
        live.clear()
        live.add(await second.start())
        await ask(channels, second.endpoint)
        first.release.set()
        assert await running == answer_to(request())
        await channels.close()
        await first.stop()
        await second.stop()

    run(scenario())


def test_a_server_that_says_nothing_is_not_connected():
    async def scenario():
        with silent() as (_, endpoint):
            channels = Channels(lambda: frozenset({endpoint}), connect_timeout_s=0.05)
            for _ in range(2):
                with pytest.raises(NotConnectedError, match="took no connection within 0.05 s"):
                    await ask(channels, endpoint)
            patient = Channels(lambda: frozenset({endpoint}), connect_timeout_s=30.0)
            with pytest.raises(TimeoutError):
                await ask(patient, endpoint, within_s=0.05)
            await channels.close()
            await patient.close()

    run(scenario())


def test_a_connection_that_failed_meanwhile_is_made_anew():
    async def scenario():
        with silent() as (listening, endpoint):
            channels = Channels(lambda: frozenset({endpoint}), connect_timeout_s=30.0)
            waiting = asyncio.ensure_future(ask(channels, endpoint))
            loop = asyncio.get_running_loop()
            listening.setblocking(False)
            taken, _ = await loop.sock_accept(listening)
            waiting.cancel()
            await asyncio.wait((waiting,))
            taken.close()
            listening.close()
            server = FakePolicyServer(port=endpoint.port)
            await server.start()
            while True:
                try:
                    assert await ask(channels, endpoint) == answer_to(request())
                    break
                except NotConnectedError:  # it still waited for the one that failed
                    continue
            await channels.close()
            await server.stop()

    run(scenario())


def test_many_requests_share_a_connection_that_is_being_made():
    async def scenario():
        server = FakePolicyServer()
        endpoint = await server.start()
        channels = Channels(lambda: frozenset({endpoint}))
        await asyncio.gather(*(ask(channels, endpoint) for _ in range(8)))
        assert len(server.requests) == 8
        await server.stop()
        results = await asyncio.gather(
            *(ask(channels, endpoint) for _ in range(8)), return_exceptions=True
        )
        assert all(isinstance(each, NotConnectedError) for each in results)
        await channels.close()

    run(scenario())


def test_one_that_leaves_does_not_take_the_connection_from_others():
    async def scenario():
        with silent() as (listening, endpoint):
            channels = Channels(lambda: frozenset({endpoint}), connect_timeout_s=30.0)
            first, second = (asyncio.ensure_future(ask(channels, endpoint)) for _ in range(2))
            listening.setblocking(False)
            taken, _ = await asyncio.get_running_loop().sock_accept(listening)
            first.cancel()
            await asyncio.wait((first,))
            peer = Peer(*await asyncio.open_connection(sock=taken))
            peer.send(frames.settings({}))
            assert await peer.preface() == frames.PREFACE
            peer.answer(await peer.request(), answer_to(request()))
            assert await second == answer_to(request())
            await channels.close()
            await peer.close()

    run(scenario())


def test_a_host_name_that_is_not_known_is_told():
    async def scenario():
        for host in ("no-such-host.invalid", "no..host"):
            endpoint = Endpoint(Scheme.GRPC, host, 50063)
            channels = Channels(lambda endpoint=endpoint: frozenset({endpoint}))
            with pytest.raises(NotConnectedError, match="its host name is not known"):
                await ask(channels, endpoint)
            await channels.close()

    run(scenario())


def test_a_server_that_takes_one_request_at_a_time_gets_as_many_connections():
    async def scenario():
        async with scripted(MAX_CONCURRENT_STREAMS=1) as (channels, endpoint, peers):
            asking = [asyncio.ensure_future(ask(channels, endpoint)) for _ in range(3)]
            held = [await peers.get() for _ in asking]
            ids = [await peer.request() for peer in held]
            for peer, stream_id in zip(held, ids, strict=True):
                peer.answer(stream_id, answer_to(request()))
            assert await asyncio.gather(*asking) == [answer_to(request())] * 3

    run(scenario())


def test_a_server_that_takes_no_requests_is_not_connected():
    async def scenario():
        async with scripted(MAX_CONCURRENT_STREAMS=0) as (channels, endpoint, peers):
            with pytest.raises(NotConnectedError, match="it takes no requests"):
                await ask(channels, endpoint)
            await (await peers.get()).ended()

    run(scenario())


def test_who_waits_for_a_server_that_is_gone_meanwhile_is_told_so():
    """It may listen still, and greet."""

    async def scenario():
        second = FakePolicyServer()
        with silent() as (listening, first):
            live = {first}
            channels = Channels(lambda: frozenset(live), connect_timeout_s=30.0)
            asking = asyncio.ensure_future(ask(channels, first))
            taken, _ = await asyncio.to_thread(listening.accept)
            live.clear()
            live.add(await second.start())
            await ask(channels, second.endpoint)
            peer = Peer(*await asyncio.open_connection(sock=taken))
            peer.send(frames.settings({}))
            with pytest.raises(NotConnectedError, match="it takes no requests"):
                await asking
            await peer.ended()
            listening.setblocking(False)
            with pytest.raises(BlockingIOError):
                listening.accept()
            await peer.close()
            await channels.close()
        await second.stop()

    run(scenario())


def test_what_a_server_has_not_looked_at_has_not_started():
    """By its own word: it refuses the stream, or leaves and names an earlier one as the last."""

    async def scenario():
        async with scripted() as (channels, endpoint, peers):
            asking = asyncio.ensure_future(ask(channels, endpoint))
            peer = await peers.get()
            peer.send(frames.rst_stream(await peer.request(), ErrorCode.REFUSED_STREAM))
            error = await failed(asking)
            assert error.code is Code.UNAVAILABLE
            assert error.metadata == ((NOT_STARTED, "1"),)
            both = [asyncio.ensure_future(ask(channels, endpoint)) for _ in range(2)]
            ids = [await peer.request() for _ in both]
            peer.send(frames.goaway(ids[0], ErrorCode.NO_ERROR, "restart"))
            error = await failed(both[1])
            assert error.metadata == ((NOT_STARTED, "1"),)
            assert "the server closes the connection: restart" in error.details
            # The other one goes on, and what comes next is put on a connection of its own.
            peer.answer(ids[0], answer_to(request()))
            assert await both[0] == answer_to(request())
            third = asyncio.ensure_future(ask(channels, endpoint))
            other = await peers.get()
            other.answer(await other.request(), answer_to(request()))
            await third

    run(scenario())


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ErrorCode.CANCEL, Code.CANCELLED),
        (ErrorCode.INTERNAL_ERROR, Code.INTERNAL),
        (ErrorCode.ENHANCE_YOUR_CALM, Code.RESOURCE_EXHAUSTED),
    ],
)
def test_a_stream_that_a_server_resets_has_started(code, status):
    async def scenario():
        async with scripted() as (channels, endpoint, peers):
            asking = asyncio.ensure_future(ask(channels, endpoint))
            peer = await peers.get()
            peer.send(frames.rst_stream(await peer.request(), code))
            error = await failed(asking)
            assert error.code is status
            assert error.metadata == ()

    run(scenario())


@pytest.mark.parametrize(
    "ending", [frames.rst_stream(1, ErrorCode.REFUSED_STREAM), frames.goaway(0, ErrorCode.NO_ERROR)]
)
def test_a_request_whose_answer_has_begun_has_started_whatever_its_server_says(ending):
    async def scenario():
        async with scripted() as (channels, endpoint, peers):
            asking = asyncio.ensure_future(ask(channels, endpoint))
            peer = await peers.get()
            assert await peer.request() == 1
            peer.send(frames.headers(1, HEAD, 16384) + ending)
            assert (await failed(asking)).metadata == ()

    run(scenario())


def test_a_connection_that_is_lost_under_a_call_ends_it():
    async def scenario():
        async with scripted() as (channels, endpoint, peers):
            asking = asyncio.ensure_future(ask(channels, endpoint))
            peer = await peers.get()
            await peer.request()
            await peer.close()
            error = await failed(asking)
            assert (error.code, error.metadata) == (Code.UNAVAILABLE, ())
            assert error.details == "the connection was lost"

    run(scenario())


@pytest.mark.parametrize(
    ("parts", "code", "words"),
    [
        ([(HEAD, None)], Code.UNKNOWN, "has no grpc-status"),
        ([(written(((b":status", b"503"),)), None)], Code.UNAVAILABLE, "HTTP status 503"),
        ([(written(((b":status", b"404"),)), None)], Code.UNIMPLEMENTED, "HTTP status 404"),
        ([(written(((b"x", b"y"),)), None)], Code.UNKNOWN, "HTTP status no"),
        ([(HEAD + written(((b"grpc-status", b"0"),)), None)], Code.INTERNAL, "one message"),
        ([(HEAD + written(((b"grpc-status", b"99"),)), None)], Code.UNKNOWN, ""),
        ([(HEAD + written(((b"grpc-status", b"x"),)), None)], Code.UNKNOWN, ""),
        ([(HEAD + written(((b"grpc-status", b"1" * 5000),)), None)], Code.UNKNOWN, ""),
        ([(written(((b":status", b"9" * 5000),)), None)], Code.UNKNOWN, "HTTP status 999"),
        (
            [(HEAD, b"\x01\0\0\0\x01x"), (written(((b"grpc-status", b"0"),)), None)],
            Code.INTERNAL,
            "compressed, which it was not asked for",
        ),
        (
            [(HEAD, b"\x00\0\0\0\x02x"), (written(((b"grpc-status", b"0"),)), None)],
            Code.INTERNAL,
            "not with one message",
        ),
        (
            [(HEAD, b"\x00\0\0\0\x00" * 2), (written(((b"grpc-status", b"0"),)), None)],
            Code.INTERNAL,
            "not with one message",
        ),
        ([(HEAD, b"\x00\xff\xff\xff\xff")], Code.RESOURCE_EXHAUSTED, "at most"),
        ([(HEAD, b"\x07\0\0\0\x00")], Code.RESOURCE_EXHAUSTED, "which means nothing"),
    ],
)
def test_an_answer_that_is_not_grpcs_is_told(parts, code, words):
    async def scenario():
        async with scripted() as (channels, endpoint, peers):
            asking = asyncio.ensure_future(ask(channels, endpoint))
            peer = await peers.get()
            stream_id = await peer.request()
            for number, (block, data) in enumerate(parts, 1):
                last = number == len(parts) and data is None
                peer.send(frames.headers(stream_id, block, 16384, last=last))
                if data is not None:
                    peer.data(stream_id, data)
            error = await failed(asking)
            assert error.code is code
            assert words in error.details

    run(scenario())


def test_a_request_larger_than_allowed_is_not_sent():
    async def scenario():
        async with scripted() as (_, endpoint, peers):
            channels = Channels(lambda: frozenset({endpoint}), max_message_bytes=10)
            error = await failed(asyncio.ensure_future(ask(channels, endpoint)))
            assert error.code is Code.RESOURCE_EXHAUSTED
            assert peers.empty()

    run(scenario())


def test_a_server_that_closes_while_it_is_greeted_refuses():
    async def scenario():
        with silent() as (listening, endpoint):
            channels = Channels(lambda: frozenset({endpoint}), connect_timeout_s=30.0)
            asking = asyncio.ensure_future(ask(channels, endpoint))
            listening.setblocking(False)
            taken, _ = await asyncio.get_running_loop().sock_accept(listening)
            taken.close()
            with pytest.raises(NotConnectedError, match="refuses connections"):
                await asking
            await channels.close()

    run(scenario())


def test_the_answer_may_come_before_the_whole_request_was_taken():
    """A refusal, say: the rest of the request is not sent."""

    async def scenario():
        async with scripted(INITIAL_WINDOW_SIZE=10) as (channels, endpoint, peers):
            asking = asyncio.ensure_future(ask(channels, endpoint))
            peer = await peers.get()
            stream_id = await peer.request(whole=False)
            block = HEAD + written(((b"grpc-status", b"3"), (b"grpc-message", b"no%20%C3%A9")))
            peer.send(frames.headers(stream_id, block, 16384, last=True))
            error = await failed(asking)
            assert (error.code, error.details) == (Code.INVALID_ARGUMENT, "no é")
            assert await peer.reset_of(stream_id) == ErrorCode.CANCEL

    run(scenario())
