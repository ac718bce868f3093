"""Mode `direct` where the first choice cannot take the request, or broke it."""

from __future__ import annotations

import asyncio

import pytest

from phalanx.client import AsyncRoleClient
from phalanx.errors import (
    ConfigurationError,
    DeadlineExceededError,
    EngineUnavailableError,
    InvalidRequestError,
    NoServerError,
    RequestFailedError,
    RoleNotReadyError,
)
from phalanx.routing.roles.snapshot import ReplicaState
from phalanx.schema.roles import RoutingPolicy, RoutingSpec
from tests.client.roles.published import PAYLOAD, heard, role
from tests.client.roles.servers import (
    FakeEngine,
    FakeGateway,
    Request,
    content,
    model,
)


def test_d4_a_model_that_is_not_ready_is_looked_at_once_more_before_it_is_refused():
    async def scenario():
        engine = FakeEngine()
        async with role(engine) as gateway, AsyncRoleClient(gateway.role_url) as client:
            asleep = engine.replica(ReplicaState.SLEEPING)
            gateway.publish(
                content(model("math", asleep, state=ReplicaState.SLEEPING), phase="train")
            )
            await client.engines()
            before = len([query for query in gateway.asked if "after" not in query])
            with pytest.raises(RoleNotReadyError, match="it is sleeping") as raised:
                await client.generate(PAYLOAD)
            error = raised.value
            assert (error.state, error.phase, error.model) == ("sleeping", "train", "math")
            after = len([query for query in gateway.asked if "after" not in query])
            assert after == before + 1 and engine.requests == []

    asyncio.run(scenario())


def test_d4_a_second_look_that_finds_a_replica_is_enough():
    async def scenario():
        engine = FakeEngine()
        async with role(engine) as gateway, AsyncRoleClient(gateway.role_url) as client:
            await client.wait_ready()
            await gateway.arrived(2)  # the long poll, and it is the last that is answered
            ready = gateway.registry.snapshot.content
            gateway.fault = hold_long_polls(gateway)
            gateway.publish(content(model("math", state=ReplicaState.STARTING)))
            await heard(client, gateway)
            gateway.publish(ready)
            assert (await client.generate(PAYLOAD))["sent"] == PAYLOAD

    asyncio.run(scenario())


def hold_long_polls(gateway: FakeGateway):
    """Only who does not wait for a change is answered from now on."""

    async def held(request: Request) -> None:
        if "after" in request.query:
            await request.gone.wait()
            request.cut()
        else:
            await gateway._discovery(request)

    return held


def test_d4_a_failed_connect_is_followed_by_one_refresh_and_another_replica():
    async def scenario():
        gone, there = FakeEngine("math/0"), FakeEngine("math/1")
        async with role(there) as gateway:
            await gone.start()
            gateway.show(model("math", gone.replica(), there.replica()))
            await gone.stop()
            async with AsyncRoleClient(gateway.role_url) as client:
                await client.wait_ready()
                for _ in range(4):
                    assert (await client.generate(PAYLOAD))["path"] == "/generate"
                assert len(there.requests) == 4
                looks = [query for query in gateway.asked if "after" not in query]
                assert 2 <= len(looks) <= 5  # the first, and one for each failed connect

    asyncio.run(scenario())


@pytest.mark.parametrize("policy", RoutingPolicy)
def test_d4_what_was_not_reached_is_not_chosen_again_however_idle_or_preferred(policy):
    async def scenario():
        async def hold(request: Request) -> None:
            if request.json == {"hold": True}:
                await release.wait()
            request.answer({})

        release = asyncio.Event()
        gone, there = FakeEngine("math/0"), FakeEngine("math/1", hold)
        async with role(there) as gateway, AsyncRoleClient(gateway.role_url) as client:
            busy = asyncio.create_task(client.generate({"hold": True}))
            await there.arrived()
            await gone.start()
            gateway.publish(
                content(
                    model("math", gone.replica(), there.replica()),
                    routing=RoutingSpec(policy=policy),
                )
            )
            await gone.stop()
            await heard(client, gateway)
            for number in range(8):
                assert await client.generate({}, affinity=f"key-{number}") == {}
            release.set()
            await busy

    asyncio.run(scenario())


def test_d4_the_second_failed_connect_is_the_last():
    async def scenario():
        async with role() as gateway, AsyncRoleClient(gateway.role_url) as client:
            dead = [FakeEngine(f"math/{number}") for number in range(3)]
            for engine in dead:
                await engine.start()
            gateway.show(model("math", *(engine.replica() for engine in dead)))
            for engine in dead:
                await engine.stop()
            await client.wait_ready()
            before = len([query for query in gateway.asked if "after" not in query])
            with pytest.raises(NoServerError, match="cannot be reached.*nothing was sent"):
                await client.generate(PAYLOAD)
            after = len([query for query in gateway.asked if "after" not in query])
            assert after == before + 1

    asyncio.run(scenario())


def test_d4_the_only_replica_is_not_tried_twice_at_the_same_process_but_a_new_one_is():
    async def scenario():
        old, new = FakeEngine("math/0"), FakeEngine("math/0")
        async with role(new) as gateway, AsyncRoleClient(gateway.role_url) as client:
            await old.start()
            gateway.show(model("math", old.replica()))
            await client.wait_ready()
            await old.stop()
            with pytest.raises(NoServerError, match="cannot be reached"):
                await client.generate(PAYLOAD)
            gateway.show(model("math", new.replica(generation=1)))
            assert (await client.generate(PAYLOAD))["sent"] == PAYLOAD

    asyncio.run(scenario())


@pytest.mark.parametrize("after_head", [False, True])
def test_i43_d4_a_request_that_was_sent_is_never_sent_again(after_head):
    async def scenario():
        async def lose(request: Request) -> None:
            if after_head:
                request.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")
                await request.writer.drain()
            request.cut()

        engines = FakeEngine("math/0", lose), FakeEngine("math/1", lose)
        async with role(*engines) as gateway, AsyncRoleClient(gateway.role_url) as client:
            await client.wait_ready()
            before = len([query for query in gateway.asked if "after" not in query])
            with pytest.raises(EngineUnavailableError, match="may have run, so it is not sent"):
                await client.generate(PAYLOAD)
            assert sum(len(engine.requests) for engine in engines) == 1
            # The failure only puts the snapshot in doubt: the next request looks first.
            with pytest.raises(EngineUnavailableError):
                await client.generate(PAYLOAD)
            after = len([query for query in gateway.asked if "after" not in query])
            assert after == before + 1
            assert sum(len(engine.requests) for engine in engines) == 2

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidRequestError),
        (401, ConfigurationError),
        (404, ConfigurationError),
        (429, EngineUnavailableError),
        (500, RequestFailedError),
        (502, EngineUnavailableError),
        (503, EngineUnavailableError),
        (504, DeadlineExceededError),
    ],
)
def test_i43_what_an_engine_answers_is_told_and_never_tried_elsewhere(status, kind):
    async def scenario():
        async def refuse(request: Request) -> None:
            request.answer({"error": {"message": "said so"}}, status, retry_after="1")

        engines = FakeEngine("math/0", refuse), FakeEngine("math/1", refuse)
        async with role(*engines) as gateway:
            for mode in ("direct", "auto"):
                async with AsyncRoleClient(gateway.role_url, mode=mode) as client:
                    before = sum(len(engine.requests) for engine in engines)
                    with pytest.raises(kind, match=f"{status}: said so") as raised:
                        await client.generate(PAYLOAD)
                    # An engine's word for "later" does not say that it has not begun.
                    assert not isinstance(raised.value, NoServerError)
                    assert sum(len(engine.requests) for engine in engines) == before + 1

    asyncio.run(scenario())
