"""Mode `direct`: straight to the engines that discovery shows, by the rules of the gateway."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager

import pytest

from phalanx.client import AsyncRoleClient, RoleClientSettings
from phalanx.client.roles.request import Kind, RoleRequest
from phalanx.errors import (
    ConfigurationError,
    DeadlineExceededError,
    EngineUnavailableError,
    InvalidRequestError,
    NoServerError,
    RequestFailedError,
    RoleNotReadyError,
    UnknownModelError,
)
from phalanx.routing.roles.snapshot import ReplicaState, RoleReplica
from phalanx.schema.roles import RouteMode, RoutingPolicy, RoutingSpec
from tests.client.roles.servers import (
    HOST,
    FakeEngine,
    FakeGateway,
    Request,
    content,
    echo,
    model,
)
from tests.client.roles.shifted_loop import advance, run_shifted

PAYLOAD = {"input_ids": [1, 2], "sampling_params": {"temperature": 0}, "custom": {"kept": [None]}}


@asynccontextmanager
async def role(*engines: FakeEngine, key: str | None = None):
    """Engines of model `math`, published by a gateway; all run."""
    gateway = FakeGateway(key=key)
    for server in (*engines, gateway):
        await server.start()
    gateway.show(model("math", *(engine.replica() for engine in engines)))
    try:
        yield gateway
    finally:
        for server in (*engines, gateway):
            await server.stop()


async def heard(client: AsyncRoleClient, gateway: FakeGateway) -> None:
    """Until the client knows what is published now."""
    mirror, wanted = client._calls.follower.mirror, gateway.registry.snapshot
    while (mirror.snapshot.epoch, mirror.snapshot.revision) != (wanted.epoch, wanted.revision):
        await mirror.wait(mirror.snapshot.revision, None, mirror.snapshot.epoch)


def closed_port() -> str:
    """Where nobody listens."""
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        return f"http://{HOST}:{taken.getsockname()[1]}"


def test_i25_a_payload_reaches_the_engine_without_what_says_where_it_goes():
    async def scenario():
        engine = FakeEngine()
        async with role(engine) as gateway, AsyncRoleClient(gateway.role_url) as client:
            got = await client.generate({**PAYLOAD, "model": "math"})
            assert got["path"] == "/generate" and got["sent"] == PAYLOAD
            assert await client.generate(PAYLOAD, model="math") == got
            assert [request.path for request in gateway.requests] == ["/teacher/engines"] * 2

    asyncio.run(scenario())


def test_d2_a_chat_names_the_model_as_its_engines_call_it():
    async def scenario():
        engine = FakeEngine()
        async with role(engine) as gateway, AsyncRoleClient(gateway.role_url) as client:
            messages = [{"role": "user", "content": "hi"}]
            got = await client.chat({"messages": messages}, model="math")
            assert got["path"] == "/v1/chat/completions"
            assert got["sent"] == {"messages": messages, "model": "math"}
            gateway.show(model("math", engine.replica(), served_model_name="org/math-7b"))
            await client.wait_ready()
            await heard(client, gateway)
            got = await client.chat({"messages": messages, "route_key": None})
            assert got["sent"]["model"] == "org/math-7b" and "route_key" not in got["sent"]

    asyncio.run(scenario())


def test_a_batch_is_answered_as_a_list():
    async def scenario():
        async def batch(request: Request) -> None:
            request.answer([{"text": "a"}, {"text": "b"}])

        engine = FakeEngine(behave=batch)
        async with role(engine) as gateway, AsyncRoleClient(gateway.role_url) as client:
            assert await client.generate({"input_ids": [[1], [2]]}) == [
                {"text": "a"},
                {"text": "b"},
            ]
            with pytest.raises(RequestFailedError, match="a list instead of an object"):
                await client.chat({"messages": []})

    asyncio.run(scenario())


def test_i31_i36_model_alias_key_and_default_choose_as_at_the_gateway():
    async def scenario():
        math, code = FakeEngine("math/0"), FakeEngine("code/0")
        async with role(math, code) as gateway, AsyncRoleClient(gateway.role_url) as client:
            routing = RoutingSpec(
                default_model="code", route_keys={"gsm8k": "math"}, aliases={"judge": "math"}
            )
            models = model("math", math.replica()), model("code", code.replica())
            gateway.publish(content(*models, routing=routing))
            for selector, engine in (
                ({"model": "math"}, math),
                ({"model": "judge", "route_key": "?"}, math),
                ({"route_key": "gsm8k"}, math),
                ({}, code),
            ):
                before = len(engine.requests)
                await client.generate(PAYLOAD, **selector)
                await client.generate({**PAYLOAD, **selector})
                assert len(engine.requests) == before + 2
            with pytest.raises(UnknownModelError, match="no model 'typo'") as raised:
                await client.generate(PAYLOAD, model="typo")
            assert raised.value.field == "model"
            with pytest.raises(UnknownModelError, match="no route_key 'typo'") as raised:
                await client.generate(PAYLOAD, route_key="typo")
            assert raised.value.field == "route_key"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("payload", "arguments", "field", "why"),
    [
        ({"model": "a"}, {"model": "b"}, "model", "give it once"),
        ({"model": 3}, {}, "model", "give a string"),
        ({"route_key": ["k"]}, {}, "route_key", "give a string"),
        ({"stream": True}, {}, "stream", "begins with `stream_`"),
        ({}, {"affinity": "no\nline"}, "affinity", "printable"),
        ({"input_ids": object()}, {}, "", "cannot be written as JSON"),
        ({"messages": []}, {}, "messages", "use chat"),
    ],
)
def test_a_request_that_cannot_be_sent_is_refused_before_it_is(payload, arguments, field, why):
    async def scenario():
        engine = FakeEngine()
        async with role(engine) as gateway, AsyncRoleClient(gateway.role_url) as client:
            with pytest.raises(InvalidRequestError, match=why) as raised:
                await client.generate(payload, **arguments)
            assert raised.value.field == field and engine.requests == []

    asyncio.run(scenario())


def test_requests_spread_over_replicas_and_the_busy_one_gets_none():
    async def scenario():
        async def hold(request: Request) -> None:
            await release.wait()
            request.answer({})

        release = asyncio.Event()
        slow, quick = FakeEngine("math/0", hold), FakeEngine("math/1")
        async with role(slow, quick) as gateway, AsyncRoleClient(gateway.role_url) as client:
            first = [asyncio.create_task(client.generate(PAYLOAD)) for _ in range(2)]
            await slow.arrived()
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            for _ in range(5):
                await client.generate(PAYLOAD)
            assert (len(slow.requests), len(quick.requests)) == (1, 6)
            release.set()
            await asyncio.gather(*first)

    asyncio.run(scenario())


def test_by_policy_affinity_a_key_stays_at_its_replica_and_is_sent_along():
    async def scenario():
        engines = [FakeEngine(f"math/{number}") for number in range(3)]
        async with role(*engines) as gateway, AsyncRoleClient(gateway.role_url) as client:
            gateway.publish(
                content(
                    model("math", *(engine.replica() for engine in engines)),
                    routing=RoutingSpec(policy=RoutingPolicy.AFFINITY),
                )
            )
            for _ in range(4):
                got = await client.generate(PAYLOAD, affinity="group-7")
                assert got["headers"]["x-smg-routing-key"] == "group-7"
            assert sorted(len(engine.requests) for engine in engines) == [0, 0, 4]

    asyncio.run(scenario())


def test_i37_a_model_with_a_router_is_sent_to_its_router():
    async def scenario():
        engine, router = FakeEngine(), FakeEngine("router")
        async with role(engine, router) as gateway, AsyncRoleClient(gateway.role_url) as client:
            gateway.show(
                model(
                    "math",
                    engine.replica(),
                    route_mode=RouteMode.SGLANG_ROUTER,
                    router_url=router.url,
                )
            )
            await client.generate(PAYLOAD)
            assert (len(engine.requests), len(router.requests)) == (0, 1)

    asyncio.run(scenario())


def test_the_gateways_key_is_shown_to_the_gateway_alone():
    async def scenario():
        engine = FakeEngine()
        async with role(engine, key="k1") as gateway:
            async with AsyncRoleClient(gateway.role_url, api_key="k1") as client:
                assert "authorization" not in (await client.generate(PAYLOAD))["headers"]
            settings = RoleClientSettings(engine_api_key="k2")
            async with AsyncRoleClient(gateway.role_url, api_key="k1", settings=settings) as client:
                got = await client.generate(PAYLOAD)
                assert got["headers"]["authorization"] == "Bearer k2"
            async with AsyncRoleClient(gateway.role_url) as client:
                with pytest.raises(ConfigurationError, match=r"401: show the key; give the key"):
                    await client.generate(PAYLOAD)

    asyncio.run(scenario())


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


def test_i18_d1_where_engines_are_not_shown_direct_says_how_to_reach_them():
    async def scenario():
        engine = FakeEngine()
        async with role(engine) as gateway, AsyncRoleClient(gateway.role_url) as client:
            gateway.show(model("math", engine.replica()), expose_engine_urls=False)
            with pytest.raises(RoleNotReadyError, match="not shown to clients; go through"):
                await client.generate(PAYLOAD)
            document = await client.engines()
            assert document.models["math"].engines[0].base_url is None
            assert engine.requests == []

    asyncio.run(scenario())


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
            with pytest.raises(EngineUnavailableError, match="discovery cannot be had from"):
                await client.generate(PAYLOAD)
            with pytest.raises(NoServerError, match="cannot be reached"):
                await client.engines()

    asyncio.run(scenario())
