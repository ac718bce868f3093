"""LeRobot's own client, unchanged, against the gateway and real policy servers.

The environments are made by `python scripts/peer_env.py lerobot04` and `lerobot06`.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from phalanx.gateway.config import Backend
from tests.gateway.lerobot.real_client import lerobots_python, policy_server, real_client
from tests.gateway.policy_servers import HOST, run
from tests.gateway.whole import ready, running

pytestmark = pytest.mark.long
NUM_ACTIONS = 300


@pytest.fixture(params=["lerobot04", "lerobot06"])
def python(request):
    return lerobots_python(request.param)


@pytest.fixture
def newest() -> Path:
    """Of those that are installed here."""
    try:
        return lerobots_python("lerobot06")
    except pytest.skip.Exception:
        return lerobots_python("lerobot04")


def test_r105_the_robot_keeps_moving_while_servers_come_and_go_and_their_gateway_too(
    python, tmp_path
):
    async def scenario():
        async with AsyncExitStack() as stack:
            lost, stays, added = await asyncio.gather(
                *(
                    stack.enter_async_context(policy_server(tmp_path / f"server-{number}.log"))
                    for number in range(3)
                )
            )
            options = {
                "backends": tuple(Backend("pi05", server.endpoint) for server in (lost, stays)),
                "lerobot": True,
                "state_file": tmp_path / "state",
            }
            async with running(**options) as gateway:
                await ready(gateway, 2)
                options["grpc_address"] = address = f"{HOST}:{gateway.grpc_port}"
                client = await stack.enter_async_context(real_client(python, address, tmp_path))
                await client.moved(NUM_ACTIONS // 3)
                await lost.kill()
                await client.moved(NUM_ACTIONS // 2)
                registry = gateway.pool.registry
                added_id = registry.register_managed("pi05", added.endpoint).server_id
                await ready(gateway, 2)
                moves = NUM_ACTIONS
                await client.moved(moves)
                while not gateway.pool.traffic.of(added_id).num_requests:
                    moves += 30
                    await client.moved(moves)
                times = tuple(client.move_times_s)
            async with running(**options):
                await client.moved(len(client.move_times_s) + 60)
                await client.stop()
            return times

    times = run(scenario())
    pauses = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    rate = (len(times) - 1) / (times[-1] - times[0])
    print(f"{len(times)} actions at {rate:.1f} Hz, longest pause {1000 * max(pauses):.0f} ms")


MISMATCHES = {
    "--robot.camera_names=[front, ceiling]": "'ceiling'",
    "--robot.num_joints=7": "the state has 7 numbers; this policy takes 8",
    "--pretrained_name_or_path=pi0": "model 'pi0' is not served here",
}


def test_r106_what_does_not_match_is_in_the_clients_log_before_the_robot_moves(newest, tmp_path):
    folders = [tmp_path / f"client-{number}" for number in range(len(MISMATCHES))]
    for folder in folders:
        folder.mkdir()

    async def scenario():
        async with policy_server(tmp_path / "server.log") as server:
            backends = (Backend("pi05", server.endpoint),)
            async with running(backends=backends, lerobot=True) as gateway:
                await ready(gateway, 1)
                address = f"{HOST}:{gateway.grpc_port}"

                async def log_of(folder: Path, option: str) -> str:
                    async with real_client(newest, address, folder, option) as client:
                        await client.ended()
                        assert client.move_times_s == []
                        return client.log

                return await asyncio.gather(
                    *(log_of(*told) for told in zip(folders, MISMATCHES, strict=True))
                )

    for log, words in zip(run(scenario()), MISMATCHES.values(), strict=True):
        assert "Failed to connect to policy server" in log
        assert words in log.partition("details = ")[2].partition("\n")[0]
