"""Which model and which engine a role's request goes to."""

from __future__ import annotations

import json

import pytest

from phalanx.schema.roles import RoutingPolicy, RoutingSpec, UnmappedRouteKey
from tests.gateway.roles.running import (
    CHAT,
    GENERATE,
    Engine,
    ask_json,
    content,
    listening,
    model,
    raw,
    role,
    run,
)
from tests.gateway.roles.test_relaying import Streaming

ROUTING = RoutingSpec(
    default_model="math", route_keys={"gsm8k": "math", "gone": "math"}, aliases={"coder": "code"}
)


@pytest.mark.parametrize(
    ("body", "to"),
    [
        (b'{"model": "code"}', "code"),
        (b'{"model": "coder"}', "code"),
        (b'{"model": "code", "route_key": "gsm8k"}', "code"),
        (b'{"model": null, "route_key": "gsm8k"}', "math"),
        (b'{"mod\\u0065l": "code", "text": "model"}', "code"),
        (b'{"model": "math", "model": "code"}', "code"),
        (b"{}", "math"),
        (b'{"messages": {"model": "code"}}', "math"),
    ],
)
def test_i31_i32_i33_the_model_wins_then_the_key_then_the_default(body, to):
    engines = {"math": Engine(), "code": Engine()}

    async def scenario():
        async with listening(*engines.values()) as (math, code):
            published = content(model("math", math), model("code", code), routing=ROUTING)
            async with role(published) as front:
                for path in (GENERATE, CHAT):
                    answer = await front.ask(path, body)
                    assert (answer.status, answer.headers["x-inference-model"]) == (200, to)

    run(scenario())
    assert {name: len(engine.asked) for name, engine in engines.items()} == {
        name: 2 if name == to else 0 for name in engines
    }


@pytest.mark.parametrize(
    ("routing", "body", "param"),
    [
        (ROUTING, b'{"model": "cod"}', "model"),
        (ROUTING, b'{"model": ""}', "model"),
        (ROUTING, b'{"model": "none", "route_key": "gsm8k"}', "model"),
        (ROUTING, b'{"route_key": "mbpp"}', "route_key"),
        (RoutingSpec(), b"{}", "model"),
    ],
)
def test_i34_i35_i36_d3_a_selector_that_is_given_has_to_resolve(routing, body, param):
    engine = Engine()

    async def scenario():
        async with listening(engine) as (port,):
            published = content(model("math", port), model("code", port), routing=routing)
            async with role(published) as front:
                return [await front.ask(path, body) for path in (GENERATE, CHAT)]

    for answer in run(scenario()):
        assert answer.status == 400 and engine.asked == []
        error = ask_json(answer)["error"]
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"
        assert "x-inference-model" not in answer.headers


def test_d3_an_unmapped_key_falls_to_the_default_where_that_is_asked_for():
    engine = Engine()
    routing = RoutingSpec(
        default_model="math",
        route_keys={"gsm8k": "code"},
        on_unmapped_route_key=UnmappedRouteKey.DEFAULT,
    )

    async def scenario():
        async with listening(engine) as (port,):
            published = content(model("math", port), model("code", port), routing=routing)
            async with role(published) as front:
                for key, to in (("typo", "math"), ("gsm8k", "code")):
                    answer = await front.ask(GENERATE, b'{"route_key": "%b"}' % key.encode())
                    assert answer.headers["x-inference-model"] == to

    run(scenario())
    assert engine.bodies == [b"{}", b"{}"]


def test_the_same_routing_key_goes_to_the_same_engine():
    engines = [Engine() for _ in range(3)]
    policy = RoutingSpec(policy=RoutingPolicy.AFFINITY)

    async def scenario():
        async with listening(*engines) as ports:
            async with role(content(model("m", *ports), routing=policy)) as front:
                for key in "abcdefgh" * 3:
                    body = json.dumps({"key": key}).encode()
                    answer = await front.ask(GENERATE, body, x_smg_routing_key=key)
                    assert answer.status == 200
                await front.ask(GENERATE, b"{}")

    run(scenario())
    homes = [{body for body in engine.bodies if body != b"{}"} for engine in engines]
    assert sum(map(len, homes)) == 8 and all(homes)


def test_in_flight_requests_are_counted_exactly_and_ties_rotate():
    engines = [Streaming() for _ in range(3)]

    async def scenario():
        async with listening(*engines) as ports, role(content(model("m", *ports))) as front:
            clients = [await front.connect() for _ in range(9)]
            for client in clients:
                client.write(raw(GENERATE, b"{}"))
                await client.reader.readuntil(b"\r\n\r\n")
            assert [len(engine.asked) for engine in engines] == [3, 3, 3]
            for _ in range(9):
                engines[1].go_on.release()
            await front.until_in_flight(6)
            for _ in range(3):
                client = await front.connect()
                client.write(raw(GENERATE, b"{}"))
                await client.reader.readuntil(b"\r\n\r\n")
            assert [len(engine.asked) for engine in engines] == [3, 6, 3]

    run(scenario())


def test_what_is_counted_of_an_engine_goes_with_it():
    engines = [Engine(), Engine()]

    async def scenario():
        async with listening(*engines) as ports, role(content(model("m", *ports))) as front:
            for _ in range(4):
                await front.ask(GENERATE, b"{}")
            traffic = front.gateway.servers.traffic
            assert [traffic.of(f"m/{number}").num_requests for number in (0, 1)] == [2, 2]
            front.change("m", replicas=model("m", *ports).replicas[:1])
            assert [traffic.of(f"m/{number}").num_requests for number in (0, 1)] == [2, 0]

    run(scenario())
