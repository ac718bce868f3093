"""LeRobot's own client, unchanged, moves a robot by Cosmos3 behind the gateway.

The environments are made by `python scripts/peer_env.py lerobot04` and `lerobot06`.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from phalanx.gateway.config import Backend
from tests.gateway.lerobot.real_client import (
    RealClient,
    lerobots_python,
    policy_server,
    real_client,
)
from tests.gateway.policy_servers import HOST, run
from tests.gateway.whole import ready, running

pytestmark = pytest.mark.long

MODEL = "cosmos3_policy"
EXAMPLE = "cosmos3_policy.yaml"
PLAIN = ("--set", "plugin_args.native_operators=off")
CAMERA = ("--set", "adapter.args.image_name=front")
ROBOT = (
    f"--pretrained_name_or_path={MODEL}",
    f"--policy_type={MODEL}",
    "--actions_per_chunk=8",
    "--robot.height=48",
    "--robot.width=64",
    "--robot.num_actions=8",
)
NUM_ACTIONS = 60


async def a_robot(stack: AsyncExitStack, python: Path, folder: Path, *settings: str) -> RealClient:
    """Its client, which has been started at a gateway with one server."""
    serving = policy_server(folder / "server.log", EXAMPLE, *PLAIN, *settings)
    server = await stack.enter_async_context(serving)
    backends = (Backend(MODEL, server.endpoint),)
    gateway = await stack.enter_async_context(running(backends=backends, lerobot=True))
    await ready(gateway, 1)
    address = f"{HOST}:{gateway.grpc_port}"
    return await stack.enter_async_context(real_client(python, address, folder, *ROBOT))


@pytest.mark.parametrize("peer", ["lerobot04", "lerobot06"])
def test_a_robot_moves_by_its_actions(peer, tmp_path):
    async def scenario():
        async with AsyncExitStack() as stack:
            client = await a_robot(stack, lerobots_python(peer), tmp_path, *CAMERA)
            await client.moved(NUM_ACTIONS)
            await client.stop()
            assert "ERROR" not in client.log

    run(scenario())


def test_a_robot_of_two_cameras_is_told_that_one_is_to_be_named(tmp_path):
    async def scenario():
        async with AsyncExitStack() as stack:
            client = await a_robot(stack, lerobots_python("lerobot06"), tmp_path)
            await client.ended()
            assert client.move_times_s == []
            assert "there are images 'front', 'wrist'; this policy takes one image" in client.log

    run(scenario())
