"""The synchronous client against a real gRPC server in another thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from phalanx.client import PolicyClient
from phalanx.errors import ConfigurationError, EngineUnavailableError, InvalidRequestError
from phalanx.schema.observation import Observation
from tests.gateway.policy_servers import HOST, FakePolicyServer, actions, run

IMAGE = np.full((16, 24, 3), 90, np.uint8)


@pytest.fixture
def served() -> Iterator[tuple[FakePolicyServer, str]]:
    """A policy server in a thread of its own, for clients that block."""
    ready, end = threading.Event(), threading.Event()
    held: list[FakePolicyServer] = []

    async def serve() -> None:
        server = FakePolicyServer()
        await server.start()
        held.append(server)
        ready.set()
        await asyncio.get_running_loop().run_in_executor(None, end.wait)
        await server.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    ready.wait()
    yield held[0], str(held[0].endpoint)
    end.set()
    thread.join()


def test_the_synchronous_client_does_the_same(served):
    server, address = served
    with PolicyClient(address, model="pi05") as client:
        got = client.act(images={"base": IMAGE}, state=[1.0], instruction="pick")
        np.testing.assert_array_equal(got, actions())
        np.testing.assert_array_equal(client.infer(Observation()).values, actions())
        assert client.call(Observation()).inference_time_us == 1500
        with pytest.raises(InvalidRequestError, match="not finite"):
            client.act(state=[float("nan")])
        with pytest.raises(ConfigurationError, match="does not speak"):
            client.healthy()
        assert len(server.requests) == 3
    with pytest.raises(EngineUnavailableError, match="the client is closed"):
        client.act()
    client.close()


def test_the_synchronous_client_serves_several_threads_in_turn(served):
    server, address = served
    with PolicyClient(address) as client:
        threads = [threading.Thread(target=client.act) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(server.requests) == 4


def test_the_synchronous_client_is_not_for_a_running_loop():
    async def scenario():
        with pytest.raises(ConfigurationError, match="use AsyncPolicyClient there"):
            PolicyClient(f"{HOST}:1")

    run(scenario())
    client = PolicyClient(f"{HOST}:1")

    async def inside():
        with pytest.raises(ConfigurationError, match="use AsyncPolicyClient there"):
            client.act()

    run(inside())
    client.close()
