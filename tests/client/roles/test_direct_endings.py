"""Mode `direct`: how requests end early, and what becomes of connections."""

from __future__ import annotations

import asyncio

import pytest

from phalanx.client import AsyncRoleClient
from phalanx.client.roles.request import Kind, RoleRequest
from phalanx.errors import (
    DeadlineExceededError,
    EngineUnavailableError,
    NoServerError,
)
from phalanx.routing.roles.snapshot import ReplicaState, RoleReplica
from tests.client.roles.published import PAYLOAD, closed_port, role
from tests.client.roles.servers import (
    FakeEngine,
    Request,
    echo,
    model,
)
from tests.client.roles.shifted_loop import advance, run_shifted


def test_a_deadline_cancels_the_request_at_the_engine():
    async def scenario():
        async def never(request: Request) -> None:
            await request.gone.wait()
            left.set()

        left = asyncio.Event()
        engine = FakeEngine(behave=never)
        async with role(engine) as gateway, AsyncRoleClient(gateway.role_url) as client:
            call = asyncio.create_task(client.generate(PAYLOAD, timeout_s=50))
            await engine.arrived()
            advance(51)
            with pytest.raises(DeadlineExceededError, match="it was cancelled"):
                await call
            await left.wait()

    run_shifted(scenario())


def test_cancelling_a_call_closes_the_connection_to_the_engine():
    async def scenario():
        async def never(request: Request) -> None:
            await request.gone.wait()
            left.set()

        left = asyncio.Event()
        engine = FakeEngine(behave=never)
        async with role(engine) as gateway, AsyncRoleClient(gateway.role_url) as client:
            call = asyncio.create_task(client.generate(PAYLOAD))
            await engine.arrived()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await left.wait()
            assert client._calls._balancer.load.total == 0

    asyncio.run(scenario())


def test_closing_ends_what_runs_and_what_comes_later():
    async def scenario():
        async def never(request: Request) -> None:
            await request.gone.wait()
            left.set()

        left = asyncio.Event()
        engine = FakeEngine(behave=never)
        async with role(engine) as gateway:
            client = AsyncRoleClient(gateway.role_url)
            calls = [asyncio.create_task(client.generate(PAYLOAD)) for _ in range(3)]
            await engine.arrived(3)
            await client.close()
            for call in calls:
                with pytest.raises(EngineUnavailableError, match="the client is closed"):
                    await call
            await left.wait()
            for work in (client.generate(PAYLOAD), client.engines(), client.wait_ready()):
                with pytest.raises(EngineUnavailableError, match="the client is closed"):
                    await work
            await client.close()

    asyncio.run(scenario())


def test_an_answer_that_nobody_reads_is_closed_at_the_engine():
    async def scenario():
        async def half(request: Request) -> None:
            request.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
            await request.gone.wait()
            left.set()

        left = asyncio.Event()
        async with role(FakeEngine(behave=half)) as gateway:
            async with AsyncRoleClient(gateway.role_url) as client:
                started = await client._calls.start(
                    RoleRequest.of(Kind.GENERATE, PAYLOAD, None, None, None)
                )
                await started.close()
                await left.wait()

    asyncio.run(scenario())


def test_a_connection_is_kept_for_the_next_request_and_not_once_the_engine_has_closed_it():
    async def scenario():
        engine = FakeEngine()
        async with role(engine) as gateway, AsyncRoleClient(gateway.role_url) as client:
            for _ in range(3):
                await client.generate(PAYLOAD)
            assert engine.connections == 1
            writer = engine.requests[0].writer
            writer.close()
            await writer.wait_closed()
            await client.generate(PAYLOAD)
            assert engine.connections == 2

    asyncio.run(scenario())


def test_many_requests_at_once_have_a_connection_each_and_leave_those_that_are_kept():
    async def scenario():
        async def together(request: Request) -> None:
            if len(engine.requests) == 100:
                everybody.set()
            await everybody.wait()
            request.answer({})

        everybody = asyncio.Event()
        engine = FakeEngine(behave=together)
        async with role(engine) as gateway, AsyncRoleClient(gateway.role_url) as client:
            await asyncio.gather(*(client.generate(PAYLOAD) for _ in range(100)))
            assert engine.connections == 100
            engine.requests.clear()
            engine.behave = echo
            await asyncio.gather(*(client.generate(PAYLOAD) for _ in range(50)))
            assert len(engine.requests) == 50 and engine.connections <= 150

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "url", ["grpc://h:1", "http://", "http://h:0", "http://h:x", "http://\u00fc:1"]
)
def test_an_address_that_is_none_is_an_engine_that_is_not_reached(url):
    async def scenario():
        async with role() as gateway, AsyncRoleClient(gateway.role_url) as client:
            gateway.show(model("math", RoleReplica("math/0", url, ReplicaState.READY)))
            with pytest.raises(NoServerError, match="no address of a server; nothing was sent"):
                await client.generate(PAYLOAD)

    asyncio.run(scenario())


def test_proxies_that_the_environment_names_are_not_used(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, closed_port())

    async def scenario():
        async with role(FakeEngine()) as gateway, AsyncRoleClient(gateway.role_url) as client:
            assert (await client.generate(PAYLOAD))["sent"] == PAYLOAD

    asyncio.run(scenario())


def test_nobody_answers_at_all():
    async def scenario():
        url = f"{closed_port()}/teacher"
        async with AsyncRoleClient(url) as client:
            with pytest.raises(NoServerError, match="discovery cannot be had from"):
                await client.generate(PAYLOAD)
            with pytest.raises(NoServerError, match="cannot be reached"):
                await client.engines()
            with pytest.raises(
                DeadlineExceededError, match=r"not ready within 0.02 s: .*cannot be reached"
            ):
                await client.wait_ready(timeout_s=0.02)

    asyncio.run(scenario())
