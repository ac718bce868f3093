"""Policy servers behind a real gateway: they register themselves, and one takes the other's place."""

from __future__ import annotations

import asyncio
import logging
import queue
from contextlib import ExitStack
from dataclasses import replace

import grpc
import numpy as np
import pytest
import uvloop

from phalanx.gateway.gateway import Gateway
from phalanx.gateway.grpc.channels import Channels
from phalanx.routing.endpoint import Endpoint
from phalanx.testing.policy import FakePolicyArgs, Gate, fake_actions
from phalanx.wire.robot_inference import InferenceCall, decode_response, encode_request
from tests.gateway.cut_network import network
from tests.gateway.whole import ANY_PORTS, ready, running
from tests.server.policy.running import PolicyClient, logged, seen, serving
from tests.server.test_roles_pd import free_port

KEYS = {"api_key": "k1", "admin_key": "a1", "backend_key": "b1"}


def call(gateway: Gateway, key: str = "k1") -> PolicyClient:
    return PolicyClient(f"127.0.0.1:{gateway.grpc_port}", {"authorization": f"Bearer {key}"})


async def actions(gateway: Gateway, instruction: str = "") -> np.ndarray:
    client = call(gateway)
    with client.channel:
        answer = await asyncio.to_thread(client.infer, seen(instruction), model="pi05")
    return answer.actions.values


def test_r97_servers_register_themselves_and_compute_at_the_same_time_behind_one_address():
    """Both requests are held at once, one in each server."""
    arrivals: list[queue.Queue[str]] = [queue.Queue(), queue.Queue()]
    gates = [Gate(arrived.put) for arrived in arrivals]

    async def robots() -> None:
        async with running(**KEYS) as gateway:
            with ExitStack() as servers:
                options = {
                    "gateway": f"127.0.0.1:{gateway.grpc_port}",
                    "gateway_key": "a1",
                    "api_key": "b1",
                    "model_name": "pi05",
                }
                for gate in gates:
                    servers.enter_context(serving(FakePolicyArgs(gate=gate), **options))
                await ready(gateway, 2)
                held = [asyncio.create_task(actions(gateway, "hold")) for _ in gates]
                for arrived in arrivals:
                    assert await asyncio.to_thread(arrived.get) == "hold"
                assert not any(task.done() for task in held)
                for gate in gates:
                    gate.open()
                expected = fake_actions(FakePolicyArgs(), seen())[0]
                for task in held:
                    assert np.array_equal(await task, expected)

    asyncio.run(robots())


def test_a_server_without_the_gateways_key_is_told_why():
    async def robots(told: queue.Queue[logging.LogRecord]) -> None:
        async with running(**KEYS) as gateway:
            with serving(gateway=f"127.0.0.1:{gateway.grpc_port}", model_name="pi05"):
                words = (await asyncio.to_thread(told.get)).getMessage()
                assert "UNAUTHENTICATED: send the gateway's key" in words

    with logged("phalanx.server.policy.registration", logging.WARNING) as told:
        asyncio.run(robots(told))


@pytest.mark.long
def test_a_gateway_that_is_started_anew_has_its_servers_again():
    async def robots() -> None:
        port = free_port()
        address = f"127.0.0.1:{port}"
        with serving(gateway=address, model_name="pi05"):
            for _ in range(2):
                gateway = Gateway(replace(ANY_PORTS, grpc_address=address))
                await gateway.start()
                try:
                    await ready(gateway, 1)
                    await actions(gateway)
                finally:
                    await gateway.close(drain_s=0.0)

    asyncio.run(robots())


def test_a_server_that_drains_sends_what_it_refuses_to_another():
    arrived: queue.Queue[str] = queue.Queue()
    gate = Gate(arrived.put)

    async def robots() -> None:
        async with running() as gateway:
            options = {"gateway": f"127.0.0.1:{gateway.grpc_port}", "model_name": "pi05"}
            args = FakePolicyArgs(gate=gate)
            with (
                serving(args, grace_seconds=60.0, **options) as first,
                serving(**options),
            ):
                await ready(gateway, 2)
                with first.client() as direct:
                    held = direct.future(seen("hold"))
                    assert await asyncio.to_thread(arrived.get) == "hold"
                    first.stop()
                    # The gateway has not probed it again: it still counts as ready.
                    for _ in range(4):
                        assert (await actions(gateway)).shape == (5, 3)
                    gate.open()
                    assert await asyncio.to_thread(held.result)

    asyncio.run(robots())


@pytest.mark.parametrize("instruction", ["fail", "adapter-fail"])
def test_a_servers_own_status_reaches_the_robot(instruction):
    async def robots() -> None:
        async with running() as gateway:
            with serving(gateway=f"127.0.0.1:{gateway.grpc_port}", model_name="pi05"):
                await ready(gateway, 1)
                client = call(gateway)
                with client.channel:
                    code, words = await asyncio.to_thread(
                        client.refused, seen(instruction), model="pi05"
                    )
                assert code is grpc.StatusCode.INTERNAL
                assert words == "the policy failed; the log of its server tells why"

    asyncio.run(robots())


@pytest.mark.long
def test_a_gateway_may_ask_all_the_time_whether_the_host_is_there():
    arrived: queue.Queue[str] = queue.Queue()
    gate = Gate(arrived.put)

    async def asking(address: str) -> None:
        async with network(Endpoint.parse(address)) as between:
            channels = Channels(lambda: frozenset({between.endpoint}), keepalive_s=0.3)
            payload = encode_request(InferenceCall("r1", "fake", seen("hold")))
            end_s = asyncio.get_running_loop().time() + 600.0
            call = asyncio.ensure_future(channels.infer(between.endpoint, (payload,), end_s))
            await asyncio.to_thread(arrived.get)
            pinged = asyncio.ensure_future(between.pinged(5))
            await asyncio.wait((call, pinged), return_when=asyncio.FIRST_COMPLETED)
            gate.open()
            pinged.cancel()
            answer, _ = await call
            assert decode_response(answer).request_id == "r1"
            await channels.close()

    with serving(FakePolicyArgs(gate=gate)) as server:
        uvloop.run(asking(server.address))
