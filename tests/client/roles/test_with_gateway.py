"""A direct client beside the real gateway, before the same engines: the same answers, the same errors."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from phalanx.client import AsyncRoleClient
from phalanx.errors import PhalanxError, RoleNotReadyError, UnknownModelError
from phalanx.routing.roles.snapshot import ReplicaState, RoleContent
from phalanx.schema.roles import RouteMode, RoutingSpec, UnmappedRouteKey, WorkerType
from tests.client.roles.servers import FakeEngine, Request, content, model
from tests.gateway.roles.running import RoleFront, role

ASLEEP, DRAINING = ReplicaState.SLEEPING, ReplicaState.DRAINING
PAYLOAD = {"input_ids": [1, 2], "text\u2028": {"kept": [None, 1.5]}}
SELECTORS = (
    {},
    {"model": "math"},
    {"model": "judge", "route_key": "gsm8k"},
    {"model": "typo"},
    {"model": "typo", "route_key": "gsm8k"},
    {"route_key": "gsm8k"},
    {"route_key": "typo"},
)
ROUTING = RoutingSpec(default_model="code", route_keys={"gsm8k": "math"}, aliases={"judge": "math"})


@asynccontextmanager
async def both(*engines: FakeEngine):
    """The gateway's front, and its clients: direct, and through the gateway."""
    for engine in engines:
        await engine.start()
    try:
        async with role(content()) as front:
            url = f"http://127.0.0.1:{front.port}/rollout"
            async with (
                AsyncRoleClient(url) as direct,
                AsyncRoleClient(url, mode="gateway") as through,
            ):
                yield front, direct, through
    finally:
        for engine in engines:
            await engine.stop()


async def told(request: Request) -> None:
    """What the engine was asked, without what a proxy adds."""
    request.answer({"path": request.path, "sent": request.json})


async def outcome(front: RoleFront, client: AsyncRoleClient, kind: str, selector) -> object:
    """Of one request, made with the snapshot that is published now."""
    await client.wait_ready("anchor")
    snapshot = front.registry.snapshot
    while client.snapshot.revision != snapshot.revision:
        await client._calls.follower.mirror.wait(client.snapshot.revision, None)
    ask = client.generate if kind == "generate" else client.chat
    try:
        return await ask(PAYLOAD, **selector)
    except PhalanxError as error:
        return type(error), vars(error), str(error)


def published(math: FakeEngine, code: FakeEngine) -> list[RoleContent]:
    """The states of a role that differ in what they do to requests."""
    anchor = replace(model("anchor", code.replica()), name="anchor")
    ready, other = model("math", math.replica()), model("code", code.replica())
    at_work = content(ready, other, anchor, routing=ROUTING)
    asleep = model("math", math.replica(ASLEEP, detail="put to sleep"), state=ASLEEP)
    disaggregated = model(
        "math",
        math.replica(worker_type=WorkerType.PREFILL),
        code.replica(worker_type=WorkerType.DECODE),
    )
    by_router = {"route_mode": RouteMode.SGLANG_ROUTER}
    return [
        at_work,
        content(replace(ready, served_model_name="org/math"), other, anchor, routing=ROUTING),
        content(ready, other, anchor),
        content(
            ready,
            other,
            anchor,
            routing=replace(ROUTING, on_unmapped_route_key=UnmappedRouteKey.DEFAULT),
        ),
        content(asleep, other, anchor, routing=ROUTING, phase="train"),
        content(model("math", math.replica(DRAINING)), other, anchor, routing=ROUTING),
        content(model("math", math.replica(blocked=True)), other, anchor, routing=ROUTING),
        content(model("math", math.replica(), state=DRAINING), anchor, routing=RoutingSpec()),
        content(disaggregated, other, anchor, routing=ROUTING),
        content(replace(disaggregated, router_url=code.url, **by_router), other, anchor),
        content(replace(disaggregated, **by_router), other, anchor, routing=ROUTING),
        content(model("math"), anchor, routing=replace(ROUTING, default_model="math")),
    ]


@pytest.mark.parametrize("kind", ["generate", "chat"])
def test_i6_i41_complaint_skyrl_845_direct_and_through_the_gateway_are_answered_and_refused_alike(
    kind,
):
    async def scenario():
        math, code = FakeEngine("math/0", told), FakeEngine("code/0", told)
        async with both(math, code) as (front, direct, through):
            seen = set()
            for state in published(math, code):
                front.publish(state)
                for selector in SELECTORS:
                    expected = await outcome(front, through, kind, selector)
                    assert await outcome(front, direct, kind, selector) == expected, selector
                    seen.add(expected[0] if isinstance(expected, tuple) else "answered")
            assert seen == {UnknownModelError, RoleNotReadyError, "answered"}

    asyncio.run(scenario())


def test_i28_a_stream_is_the_same_from_both():
    async def scenario():
        async def stream(request: Request) -> None:
            request.begin_stream()
            for number in range(3):
                request.event({"n": number, "text": "a\u2028b"})
            request.end_stream()

        engine = FakeEngine("math/0", stream)
        async with both(engine) as (front, direct, through):
            front.publish(content(model("math", engine.replica())))
            first, second = [
                [event async for event in client.stream_generate(PAYLOAD)]
                for client in (direct, through)
            ]
            assert first == second and len(first) == 3
            assert engine.requests[0].body == engine.requests[1].body

    asyncio.run(scenario())


def test_a_direct_client_follows_what_the_gateway_serves():
    async def scenario():
        engine = FakeEngine("math/0", told)
        async with both(engine) as (front, direct, through):
            front.publish(content(model("math", engine.replica(), state=ASLEEP)))
            waiting = asyncio.create_task(direct.wait_ready("math"))
            with pytest.raises(RoleNotReadyError):
                await through.generate(PAYLOAD, model="math")
            assert not waiting.done()
            front.publish(content(model("math", engine.replica())))
            assert (await waiting).revision == 2
            assert (await direct.generate(PAYLOAD))["path"] == "/generate"
            health = await through.health()
            assert health["models"]["math"]["ready"] is True

    asyncio.run(scenario())
