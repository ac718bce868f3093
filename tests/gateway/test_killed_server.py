"""Servers that are killed as processes, without a word, while requests run."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process

import grpc

from phalanx.gateway.config import Backend
from phalanx.routing.endpoint import Endpoint
from phalanx.routing.snapshot import ServerState
from tests.gateway.policy_servers import HOST, answer_to, failure, infer, request, run
from tests.gateway.whole import channel, ready, running, until


async def started() -> tuple[Process, Backend]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.gateway.policy_process", stdout=PIPE
    )
    port = int(await process.stdout.readline())
    return process, Backend("pi05", Endpoint.parse(f"{HOST}:{port}"))


def test_r111_the_requests_of_a_killed_server_fail_once_and_all_others_succeed():
    async def scenario():
        (victim, first), (other, second) = await asyncio.gather(started(), started())
        try:
            async with running(backends=(first, second)) as gateway, channel(gateway) as client:
                await ready(gateway, 2)
                held = [await infer(client, request(f"hold-{number}")) for number in range(4)]
                arrived = [await victim.stdout.readline() for _ in range(2)]
                assert [await other.stdout.readline() for _ in range(2)]
                victim.kill()
                lost = [held[int(line.decode().strip()[-1])] for line in arrived]
                for call in lost:
                    assert (await failure(call)).code() is grpc.StatusCode.UNAVAILABLE
                # The first of these may find the dead server least busy: it never starts there.
                for number in range(20):
                    sent = request(f"r-{number}")
                    assert await (await infer(client, sent)) == answer_to(sent)
                [gone] = [
                    each.server_id
                    for each in gateway.pool.snapshot.servers
                    if each.endpoint == first.endpoint
                ]
                await until(gateway, ServerState.UNHEALTHY, gone)
                names = [(await other.stdout.readline()).decode().strip() for _ in range(20)]
                assert names == [f"r-{number}" for number in range(20)], "nothing was sent again"
                assert gateway.pool.registry.load.count(gone) == 0
                for call in held:
                    call.cancel()
        finally:
            for process in (victim, other):
                if process.returncode is None:
                    process.kill()
                await process.wait()

    run(scenario())
