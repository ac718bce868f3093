"""Robots that never stop, while servers die, come back, are added and removed at random."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import grpc
import grpc.aio
import pytest

from phalanx.routing.snapshot import ServerState
from phalanx.wire import robot_inference as wire
from tests.gateway.policy_servers import answer_to, infer, request, run
from tests.gateway.whole import ProbedServer, channel, running

NUM_SERVERS, NUM_ROBOTS = 4, 6
LOST = {
    grpc.StatusCode.UNAVAILABLE,  # its server died, or none was ready
    grpc.StatusCode.CANCELLED,  # its server ended it
}


class Churn:
    """`servers` by port; None where it is dead. `seen` counts each request at all servers."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.servers: dict[int, ProbedServer | None] = {}
        self.seen: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.done = asyncio.Event()

    async def start(self, port: int = 0) -> ProbedServer:
        server = ProbedServer(self.answer, port)
        self.servers[(await server.start()).port] = server
        return server

    async def answer(self, data: bytes, context: object) -> bytes:
        self.seen[wire.peek(data).request_id] += 1
        await asyncio.sleep(0)
        return answer_to(data)

    async def robot(self, client: grpc.aio.Channel, name: str) -> None:
        number = 0
        while not self.done.is_set():
            number += 1
            sent = request(f"{name}-{number}")
            try:
                assert await (await infer(client, sent)) == answer_to(sent)
                self.ended["answered"] += 1
            except grpc.aio.AioRpcError as error:
                assert error.code() in LOST, error
                self.ended["lost"] += 1

    async def step(self, gateway) -> None:
        """One thing happens to one server, and some requests are made."""
        port, server = self.random.choice(list(self.servers.items()))
        registry = gateway.pool.registry
        if server is None:
            server = await self.start(port)
            registry.register_managed("pi05", server.endpoint)
        elif self.random.random() < 0.4:
            self.servers[port] = None
            await server.stop()
        elif self.random.random() < 0.5:
            server.healthy = not server.healthy
        else:
            for known in gateway.pool.snapshot.servers:
                if known.endpoint == server.endpoint:
                    registry.remove(known.server_id)
            registry.register_managed("pi05", server.endpoint)
        before = self.ended.total()
        while self.ended.total() < before + 20:
            await gateway.pool.watch(gateway.pool.snapshot.revision, 0.01)


def churn(seed: int, num_steps: int) -> None:
    async def scenario():
        case = Churn(seed)
        for _ in range(NUM_SERVERS):
            await case.start()
        async with running() as gateway, channel(gateway) as client:
            for server in case.servers.values():
                gateway.pool.registry.register_managed("pi05", server.endpoint)
            robots = [asyncio.create_task(case.robot(client, f"r{n}")) for n in range(NUM_ROBOTS)]
            for _ in range(num_steps):
                await case.step(gateway)
            case.done.set()
            await asyncio.gather(*robots)
            assert gateway.pool.registry.load.total == 0
            assert set(case.seen.values()) == {1}, "no request was started twice"
            assert case.ended["answered"] <= len(case.seen)
            assert case.ended["answered"] > 0
            # Whoever lives is used again.
            for port, server in case.servers.items():
                (server or await case.start(port)).healthy = True
            for server in case.servers.values():
                gateway.pool.registry.register_managed("pi05", server.endpoint)
            while any(s.state is not ServerState.READY for s in gateway.pool.snapshot.servers):
                await gateway.pool.watch(gateway.pool.snapshot.revision, 30.0)
            assert len(gateway.pool.snapshot.servers) == NUM_SERVERS
        for server in case.servers.values():
            await server.stop()

    run(scenario())


def test_no_request_is_started_twice_or_left_over_whatever_happens_to_servers():
    churn(seed=1, num_steps=8)


@pytest.mark.long
@pytest.mark.parametrize("seed", [2, 3])
def test_nor_at_length(seed):
    churn(seed, num_steps=60)
