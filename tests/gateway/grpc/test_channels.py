"""Connections to model servers: shared, tried anew after a failure, closed when the server is gone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from phalanx.gateway.grpc.channels import Channels, NotConnectedError, State
from phalanx.routing.endpoint import Endpoint
from tests.gateway.policy_servers import HOST, FakePolicyServer, answer_to, request, run


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def ask(channels: Channels, endpoint: Endpoint, within_s: float = 30.0) -> bytes:
    return (await channels.infer(endpoint, request(), now_s() + within_s))[0]


@contextmanager
def silent() -> Iterator[tuple[socket.socket, Endpoint]]:
    """An address that takes connections and says nothing."""
    with socket.socket() as listening:
        listening.bind((HOST, 0))
        listening.listen()
        yield listening, Endpoint.parse(f"{HOST}:{listening.getsockname()[1]}")


def test_the_channel_of_a_server_that_is_gone_is_closed():
    async def scenario():
        first, second = FakePolicyServer(), FakePolicyServer()
        live = {await first.start()}
        channels = Channels(lambda: frozenset(live))
        await ask(channels, first.endpoint)
        channel = channels._connections[first.endpoint].channel
        await ask(channels, first.endpoint)
        assert channels._connections[first.endpoint].channel is channel
        live.clear()
        live.add(await second.start())
        await ask(channels, second.endpoint)
        assert set(channels._connections) == live
        with pytest.raises(grpc.aio.UsageError, match="closed"):
            await channel.unary_unary("/x/y")(b"")
        await channels.close()
        await first.stop()
        await second.stop()

    run(scenario())


def test_a_call_that_runs_keeps_the_channel_of_a_server_that_is_gone():
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
        assert set(channels._connections) == live
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
            with pytest.raises(NotConnectedError, match="took no connection within 0.05 s"):
                await ask(channels, endpoint)
            assert not channels._connections
            patient = Channels(lambda: frozenset({endpoint}), connect_timeout_s=30.0)
            with pytest.raises(TimeoutError):
                await ask(patient, endpoint, within_s=0.05)
            await channels.close()
            await patient.close()

    run(scenario())


def test_a_connection_that_failed_meanwhile_is_made_anew():
    async def scenario():
        with silent() as (listening, endpoint):
            channels = Channels(lambda: frozenset({endpoint}))
            waiting = asyncio.ensure_future(ask(channels, endpoint))
            await asyncio.sleep(0)
            channel = channels._connections[endpoint].channel
            await reaches(channel, State.CONNECTING)
            waiting.cancel()
            await asyncio.wait((waiting,))
            listening.close()
            await reaches(channel, State.TRANSIENT_FAILURE)
            server = FakePolicyServer(port=endpoint.port)
            await server.start()
            assert await ask(channels, endpoint) == answer_to(request())
            await channels.close()
            await server.stop()

    run(scenario())


async def reaches(channel: grpc.aio.Channel, wanted: State) -> None:
    while (state := channel.get_state()) is not wanted:
        await channel.wait_for_state_change(state)


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
        assert not channels._connections
        await channels.close()

    run(scenario())
