"""Many streams through a role while its engines come, drain, go and break: each ends once, and none
is sent twice.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random

import pytest

from phalanx.routing.roles.snapshot import ReplicaState, RoleReplica
from tests.gateway.roles.running import (
    GENERATE,
    Engine,
    content,
    listening,
    model,
    role,
    run,
    url,
)
from tests.gateway.roles.test_relaying import EVENTS, STREAM

NUM_CALLERS, NUM_REQUESTS = 24, 12


class Breaking(Engine):
    """Streams, an event an iteration of the loop; breaks off while it is `broken`."""

    broken = False

    async def respond(self, writer):
        writer.write(STREAM)
        for event in EVENTS:
            await asyncio.sleep(0)
            if self.broken:
                raise ConnectionError
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        writer.write(b"0\r\n\r\n")


@pytest.mark.parametrize("seed", range(3))
def test_every_stream_ends_once_whatever_happens_to_the_engines(seed):
    engines = [Breaking() for _ in range(4)]
    numbers = itertools.count()
    endings: dict[int, str] = {}
    done = asyncio.Event()

    async def caller(front) -> None:
        for _ in range(NUM_REQUESTS):
            number = next(numbers)
            answer = await front.ask(GENERATE, json.dumps({"n": number}).encode())
            assert number not in endings
            if answer.status == 200:
                assert answer.whole and answer.body.endswith(EVENTS[-1])
                endings[number] = "broken" if b'"error"' in answer.body else "whole"
            else:
                assert answer.status in (502, 503), answer
                endings[number] = "lost" if answer.status == 502 else "refused"

    async def trouble(front, ports) -> None:
        chance = random.Random(seed)
        generations = [0] * len(ports)
        while not done.is_set():
            index = chance.randrange(len(ports))
            engines[index].broken = chance.random() < 0.3
            generations[index] += chance.random() < 0.3
            replicas = tuple(
                RoleReplica(
                    f"m/{ordinal}",
                    url(port),
                    chance.choice((ReplicaState.READY, ReplicaState.READY, ReplicaState.DRAINING)),
                    generations[ordinal],
                )
                for ordinal, port in enumerate(ports)
                if chance.random() < 0.8
            )
            state = ReplicaState.READY if replicas else ReplicaState.STARTING
            front.change("m", replicas=replicas, state=state)
            for _ in range(chance.randrange(5)):
                await asyncio.sleep(0)

    async def scenario():
        async with listening(*engines) as ports, role(content(model("m", *ports))) as front:
            troubling = asyncio.create_task(trouble(front, ports))
            await asyncio.gather(*(caller(front) for _ in range(NUM_CALLERS)))
            done.set()
            await troubling
            assert front.in_flight == 0 and front.server.statistics.num_answering == 0

    run(scenario())
    assert len(endings) == NUM_CALLERS * NUM_REQUESTS
    asked = [json.loads(body)["n"] for engine in engines for body in engine.bodies]
    assert len(asked) == len(set(asked)), "a request was sent twice"
    assert set(asked) == {number for number, ending in endings.items() if ending != "refused"}
    assert len(set(endings.values())) >= 3, "too little has happened"
