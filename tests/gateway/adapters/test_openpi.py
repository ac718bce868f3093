"""openpi clients at the gateway."""

from __future__ import annotations

import asyncio

import grpc
import numpy as np
import pytest

from phalanx.wire import robot_inference as wire
from phalanx.wire.msgpack_numpy import pack
from tests.gateway.adapters.running import robots
from tests.gateway.policy_servers import FakePolicyServer, actions, refusing, request, run

OBSERVATION = {
    "observation/image": np.arange(24 * 24 * 3, dtype=np.uint8).reshape(24, 24, 3),
    "observation/state": np.arange(8.0),
    "prompt": "pick up the cube",
}


def test_observations_of_one_connection_are_answered_in_order_with_their_times():
    async def scenario():
        server = FakePolicyServer()
        async with robots(server) as gateway, gateway.openpi() as client:
            assert client.metadata == {}
            first = await client.infer(OBSERVATION)
            np.testing.assert_array_equal(first["actions"], actions())
            assert first["policy_timing"] == {"infer_ms": 1.5}
            assert set(first["server_timing"]) == {"infer_ms"}
            second = await client.infer(OBSERVATION)
            assert second["server_timing"]["prev_total_ms"] == first["server_timing"]["infer_ms"]
            calls = [wire.decode_request(data) for data in server.requests]
            assert len({call.request_id for call in calls}) == 2
            observation = calls[0].observation
            np.testing.assert_array_equal(
                observation.images["image"], OBSERVATION["observation/image"]
            )
            assert observation.state.tolist() == list(range(8))
            assert observation.instructions == ("pick up the cube",)

    run(scenario())


def test_a_large_observation_is_read_on_a_thread():
    async def scenario():
        server = FakePolicyServer()
        image = np.zeros((3, 300, 300, 3), np.uint8)
        async with robots(server) as gateway, gateway.openpi() as client:
            got = await client.infer({"image": image, "prompt": ["a", "b", "c"]})
            assert got["actions"].shape == (3, 3, 2)

    run(scenario())


def test_the_model_is_named_in_the_address_or_is_the_only_one():
    async def scenario():
        pi05, pi0 = FakePolicyServer(), FakePolicyServer()
        async with robots(pi05, default_model="pi05") as gateway:
            gateway.fleet.add(await pi0.start(), "pi0")
            for target, headers, server in (
                ("/", {}, pi05),
                ("/?model=pi0", {}, pi0),
                ("/", {"x-phalanx-model": "pi0"}, pi0),
            ):
                async with gateway.openpi(target, headers) as client:
                    before = len(server.requests)
                    await client.infer(OBSERVATION)
                    assert len(server.requests) == before + 1
            async with gateway.openpi("/?model=act") as client:
                assert client.metadata == {"model_name": "act"}
                assert "model 'act' is not served here" in await client.infer(OBSERVATION)
            await pi0.stop()

    run(scenario())


def test_a_failed_request_is_a_text_and_the_next_one_is_answered():
    async def scenario():
        words = "camera 'image' is not one of base, wrist"
        server = FakePolicyServer(refusing(grpc.StatusCode.INVALID_ARGUMENT, words))
        async with robots(server) as gateway, gateway.openpi() as client:
            assert await client.infer(OBSERVATION) == words
            assert "the state is not finite" in await client.infer({"state": [float("nan")]})
            client.send("hello")
            assert "send MessagePack as a binary frame" in await client.receive()
            client.send(b"\xc1")
            assert "extension type" in await client.receive()
            server.behave = FakePolicyServer().behave
            assert isinstance(await client.infer(OBSERVATION), dict)

    run(scenario())


async def single_for_batch(data, context):
    call = wire.decode_request(data)
    return wire.encode_response(
        wire.InferenceAnswer(call.request_id, wire.decode_response(flat(call.request_id)).actions)
    )


def flat(request_id):
    from tests.gateway.policy_servers import answer_to

    return answer_to(request(request_id))


def test_an_answer_of_another_form_than_the_observation_is_told():
    async def scenario():
        async with robots(FakePolicyServer(single_for_batch)) as gateway:
            async with gateway.openpi() as client:
                got = await client.infer({"image": np.zeros((2, 4, 4, 3), np.uint8)})
                assert "actions of shape (3, 2) to a batch of 2" in got

    run(scenario())


def test_a_client_that_goes_away_cancels_its_request():
    async def scenario():
        server = FakePolicyServer()
        server.behave = server.hold
        async with robots(server) as gateway, gateway.openpi() as client:
            client.send(pack(OBSERVATION))
            await server.arrived()
            client.leave()
            await server.cancelled.wait()
            await gateway.fleet.all_left(1)
            assert gateway.fleet.codes == ["CANCELLED"]

    run(scenario())


def test_the_key_is_asked_for_as_openpi_sends_it():
    async def scenario():
        async with robots(FakePolicyServer(), api_key="secret") as gateway:
            for headers in ({}, {"authorization": "Api-Key wrong"}):
                with pytest.raises(ConnectionRefusedError, match="401"):
                    async with gateway.openpi(headers=headers):
                        pass
            for scheme in ("Api-Key", "Bearer"):
                headers = {"authorization": f"{scheme} secret"}
                async with gateway.openpi(headers=headers) as client:
                    assert isinstance(await client.infer(OBSERVATION), dict)

    run(scenario())


def test_two_robots_share_the_servers():
    async def scenario():
        servers = [FakePolicyServer(), FakePolicyServer()]
        for server in servers:
            server.behave = server.hold
        async with robots(*servers) as gateway:
            async with gateway.openpi() as one, gateway.openpi() as other:
                answers = [asyncio.ensure_future(each.infer(OBSERVATION)) for each in (one, other)]
                for server in servers:
                    await server.arrived()
                for server in servers:
                    server.release.set()
                assert all(isinstance(each, dict) for each in await asyncio.gather(*answers))

    run(scenario())
