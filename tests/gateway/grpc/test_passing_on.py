"""Requests of many clients to many servers through one gRPC address."""

from __future__ import annotations

import asyncio

import grpc
import numpy as np
import pytest

from phalanx.routing.registration import Probe
from phalanx.wire import robot_inference as wire
from tests.gateway.policy_servers import (
    FakePolicyServer,
    answer_to,
    failure,
    fleet,
    infer,
    refusing,
    request,
    run,
)

Code = grpc.StatusCode


def test_r95_the_whole_request_goes_to_the_least_busy_server_as_it_came():
    async def scenario():
        busy, free = FakePolicyServer(), FakePolicyServer()
        async with fleet(busy, free) as gateway, gateway.client() as client:
            busy.behave = free.behave = busy.hold
            held = await infer(client, request("r-1"))
            await asyncio.wait(
                [asyncio.ensure_future(s.arrived()) for s in (busy, free)],
                return_when=asyncio.FIRST_COMPLETED,
            )
            first, other = (busy, free) if busy.requests else (free, busy)
            other.behave = FakePolicyServer().behave
            # An unknown field: what the gateway does not know reaches the server all the same.
            whole = request("r-2", images={"base": np.ones((4, 4, 3), np.uint8)}) + b"\xf8\x07\x01"
            for _ in range(3):
                assert await (await infer(client, whole)) == answer_to(whole)
            assert other.requests == [whole] * 3
            assert len(first.requests) == 1
            busy.release.set()
            assert await held == answer_to(request("r-1"))
            await gateway.all_left(4)
            assert gateway.codes == ["OK"] * 4

    run(scenario())


def test_r97_servers_work_at_once_behind_one_address():
    async def scenario():
        servers = [FakePolicyServer() for _ in range(3)]
        for server in servers:
            server.behave = server.hold
        async with fleet(*servers) as gateway, gateway.client() as client:
            calls = [await infer(client, request(f"r-{index}")) for index in range(3)]
            for server in servers:
                await server.arrived()
            assert gateway.in_flight == 3
            for server in servers:
                server.release.set()
            answers = await asyncio.gather(*calls)
            assert [wire.peek_response(each).request_id for each in answers] == [
                "r-0",
                "r-1",
                "r-2",
            ]

    run(scenario())


def test_r107_successive_observations_of_a_client_go_to_different_servers():
    async def scenario():
        servers = [FakePolicyServer(), FakePolicyServer()]
        async with fleet(*servers) as gateway, gateway.client() as client:
            for index in range(6):
                await (await infer(client, request(f"r-{index}")))
            assert [len(server.requests) for server in servers] == [3, 3]

    run(scenario())


def test_r108_requests_are_counted_whatever_they_cost():
    async def scenario():
        servers = [FakePolicyServer(), FakePolicyServer()]
        for server in servers:
            server.behave = server.hold
        large = {"base": np.zeros((400, 500, 3), np.uint8)}
        async with fleet(*servers) as gateway, gateway.client() as client:
            calls = [
                await infer(client, request("r-0", images=large)),
                await infer(client, request("r-1")),
            ]
            for server in servers:
                await server.arrived()
            by_size = sorted(servers, key=lambda server: -len(server.requests[0]))
            calls += [
                await infer(client, request("r-2", images=large)),
                await infer(client, request("r-3")),
            ]
            for server in servers:
                await server.arrived(2)
            assert [len(server.requests) for server in by_size] == [2, 2]
            for server in servers:
                server.release.set()
            await asyncio.gather(*calls)

    run(scenario())


def test_r110_an_unhealthy_server_gets_no_new_request_and_finishes_what_it_has():
    async def scenario():
        failing, good = FakePolicyServer(), FakePolicyServer()
        async with fleet(failing) as gateway, gateway.client() as client:
            failing.behave = failing.hold
            started = await infer(client, request("r-0"))
            await failing.arrived()
            gateway.add(await good.start())
            [server_id] = [
                server.server_id
                for server in gateway.pool.snapshot.servers
                if server.endpoint == failing.endpoint
            ]
            for _ in range(3):
                gateway.pool.registry.observe(server_id, Probe.FAILED, "no answer")
            for index in range(1, 4):
                await (await infer(client, request(f"r-{index}")))
            assert (len(failing.requests), len(good.requests)) == (1, 3)
            failing.release.set()
            assert await started == answer_to(request("r-0"))
            gateway.pool.registry.observe(server_id, Probe.HEALTHY)
            await (await infer(client, request("r-4")))
            await (await infer(client, request("r-5")))
            assert len(failing.requests) == 2
            await good.stop()

    run(scenario())


@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.INTERNAL, Code.RESOURCE_EXHAUSTED])
def test_r111_a_started_request_is_not_sent_again(code):
    async def scenario():
        servers = [FakePolicyServer(refusing(code, "it broke")) for _ in range(2)]
        async with fleet(*servers) as gateway, gateway.client() as client:
            error = await failure(await infer(client, request()))
            assert (error.code(), error.details()) == (code, "it broke")
            assert sum(len(server.requests) for server in servers) == 1
            await gateway.all_left(1)

    run(scenario())


def test_r111_nor_is_one_whose_server_dies_under_it():
    async def scenario():
        servers = [FakePolicyServer(), FakePolicyServer()]
        for server in servers:
            server.behave = server.hold
        async with fleet(*servers) as gateway, gateway.client() as client:
            call = await infer(client, request())
            await asyncio.wait(
                [asyncio.ensure_future(server.arrived()) for server in servers],
                return_when=asyncio.FIRST_COMPLETED,
            )
            dying, other = servers if servers[0].requests else servers[::-1]
            await dying.stop()
            error = await failure(call)
            assert error.code() in (Code.UNAVAILABLE, Code.CANCELLED)
            assert other.requests == []
            await gateway.all_left(1)
            # What follows finds no connection there, has not started, and goes elsewhere.
            other.release.set()
            for index in range(3):
                await (await infer(client, request(f"r-{index}")))
            assert len(other.requests) == 3

    run(scenario())


def test_a_request_that_finds_no_connection_goes_to_another_server_once():
    async def scenario():
        gone, good = FakePolicyServer(), FakePolicyServer()
        endpoint = await gone.start()
        await gone.stop()
        async with fleet() as gateway, gateway.client() as client:
            gateway.add(endpoint)
            error = await failure(await infer(client, request()))
            assert error.code() is Code.UNAVAILABLE
            assert "no server of model 'pi05' is ready" in error.details()
            assert "it refuses connections" in error.details()
            assert str(endpoint) not in error.details(), "addresses are for operators"
            await gateway.all_left(1)
            gateway.add(endpoint)
            gateway.add(await good.start())
            for index in range(2):
                await (await infer(client, request(f"r-{index}")))
            assert len(good.requests) == 2
            await gateway.all_left(4)
            assert sorted(gateway.codes) == ["OK", "OK", "UNAVAILABLE", "UNAVAILABLE"]
            await good.stop()

    run(scenario())


def test_a_request_that_its_server_never_started_goes_to_another_server_once():
    async def scenario():
        refuse = refusing(Code.UNAVAILABLE, "stopping", [(wire.NOT_STARTED, "1")])
        servers = [FakePolicyServer(refuse) for _ in range(3)]
        async with fleet(*servers) as gateway, gateway.client() as client:
            error = await failure(await infer(client, request()))
            assert (error.code(), error.details()) == (Code.UNAVAILABLE, "stopping")
            assert sum(len(server.requests) for server in servers) == 2
            await gateway.all_left(2)
            good = FakePolicyServer()
            gateway.add(await good.start())
            for server in servers[1:]:
                server.behave = good.behave
            for index in range(8):
                await (await infer(client, request(f"r-{index}")))
            await good.stop()

    run(scenario())


def test_the_other_server_gets_it_even_where_it_is_busier():
    async def scenario():
        refuse = refusing(Code.RESOURCE_EXHAUSTED, "full", [(wire.NOT_STARTED, "1")])
        busy, refusing_one = FakePolicyServer(), FakePolicyServer(refuse)
        busy.behave = busy.hold
        async with fleet(busy) as gateway, gateway.client() as client:
            calls = [await infer(client, request(f"r-{index}")) for index in range(2)]
            await busy.arrived(2)
            gateway.add(await refusing_one.start())
            calls.append(await infer(client, request("r-2")))
            await busy.arrived(3)
            assert len(refusing_one.requests) == 1
            busy.release.set()
            await asyncio.gather(*calls)
            await refusing_one.stop()

    run(scenario())


def test_a_server_that_comes_back_at_its_address_is_reached_at_once():
    async def scenario():
        first = FakePolicyServer()
        async with fleet(first) as gateway, gateway.client() as client:
            await (await infer(client, request("r-0")))
            await first.stop()
            assert (await failure(await infer(client, request("r-1")))).code() is Code.UNAVAILABLE
            again = FakePolicyServer(port=first.endpoint.port)
            await again.start()
            gateway.add(again.endpoint)
            await (await infer(client, request("r-2")))
            assert len(again.requests) == 1
            await again.stop()

    run(scenario())


def test_a_client_that_cancels_or_goes_away_cancels_the_call_at_the_server():
    async def scenario():
        server = FakePolicyServer()
        server.behave = server.hold
        async with fleet(server) as gateway:
            client = gateway.client()
            call = await infer(client, request("r-0"))
            await server.arrived()
            call.cancel()
            await server.cancelled.wait()
            await gateway.all_left(1)
            server.cancelled.clear()
            leaving = await infer(client, request("r-1"))
            await server.arrived(2)
            await client.close()
            await server.cancelled.wait()
            await gateway.all_left(2)
            assert gateway.codes == ["CANCELLED", "CANCELLED"]
            assert leaving.cancelled()

    run(scenario())


def test_the_callers_deadline_is_the_servers_and_ends_the_request():
    async def scenario():
        server = FakePolicyServer()
        server.behave = server.hold
        async with fleet(server) as gateway, gateway.client() as client:
            error = await failure(await infer(client, request("r-0"), timeout_s=0.2))
            assert error.code() is Code.DEADLINE_EXCEEDED
            await server.cancelled.wait()
            await gateway.all_left(1)
            # gRPC sends times in coarse units.
            assert 0 < server.remaining_s[0] < 1
            call = await infer(client, request("r-1"))
            await server.arrived(2)
            # gRPC sends long times in coarse units.
            assert 590 < server.remaining_s[1] < 610
            server.release.set()
            await call

    run(scenario())
