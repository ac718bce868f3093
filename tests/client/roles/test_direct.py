"""Mode `direct`: straight to the engines that discovery shows, by the rules of the gateway."""

from __future__ import annotations

import asyncio

import pytest

from phalanx.client import AsyncRoleClient, RoleClientSettings
from phalanx.errors import (
    ConfigurationError,
    InvalidRequestError,
    RequestFailedError,
    RoleNotReadyError,
    UnknownModelError,
)
from phalanx.schema.roles import RouteMode, RoutingPolicy, RoutingSpec
from tests.client.roles.published import PAYLOAD, heard, role
from tests.client.roles.servers import (
    FakeEngine,
    Request,
    content,
    model,
)


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
        ("hello", {}, "", "JSON object of /generate, not str; give a mapping such as"),
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
