"""What a role's callers get where no engine takes their request, and that nothing is sent twice."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace

import pytest

from phalanx.gateway.http.limits import HttpLimits
from phalanx.gateway.roles.servers import DOWN_S
from phalanx.routing.roles.resolver import RoleSelector, resolve
from phalanx.routing.roles.snapshot import ReplicaState, RoleModel, RoleReplica
from phalanx.schema.roles import RouteMode, RoutingSpec, WorkerType
from phalanx.testing.clock import ManualClock
from tests.gateway.http.running import HOST
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
    routed,
    run,
    url,
)

NOT_READY = [state for state in ReplicaState if state is not ReplicaState.READY]


def free_port() -> int:
    """Nobody listens there, as long as nobody else takes it."""
    with socket.socket() as one:
        one.bind((HOST, 0))
        return one.getsockname()[1]


class Dying(Engine):
    """Cuts the connection when it has read a request."""

    async def respond(self, writer):
        raise ConnectionError


@pytest.mark.parametrize("state", NOT_READY)
@pytest.mark.parametrize("path", [GENERATE, CHAT])
def test_i39_i40_a_model_that_is_not_ready_is_503_and_nothing_is_woken(state, path):
    engine = Engine()

    async def scenario():
        async with listening(engine) as (port,):
            sleeping = content(model("m", port, state=state), phase="train")
            async with role(sleeping) as front:
                front.publish(replace(sleeping, phase="score"))
                before = front.registry.snapshot
                answer = await front.ask(path, b'{"model": "m"}')
                assert front.registry.snapshot is before
                return answer

    answer = run(scenario())
    assert engine.asked == [], "a request has reached an engine that is not ready"
    assert answer.status == 503 and int(answer.headers["retry-after"]) >= 1
    assert answer.headers["x-inference-model"] == "m"
    told = ask_json(answer)
    assert (told["role"], told["model"], told["state"], told["phase"]) == (
        "rollout",
        "m",
        state,
        "score",
    )
    assert (told["topology_revision"], told["registry_epoch"]) == (1, "epoch-1")
    assert told["error"]["type"] == "service_unavailable_error"
    assert told["error"]["code"] == "not_ready" and str(state) in told["error"]["message"]


def test_i38_only_replicas_that_are_ready_get_requests():
    engines = {state: Engine() for state in (*ReplicaState, "prefill", "blocked")}

    async def scenario():
        async with listening(*engines.values()):
            replicas = []
            for ordinal, (state, engine) in enumerate(engines.items()):
                one = RoleReplica(f"m/{ordinal}", url(engine.port), ReplicaState.READY)
                if state == "prefill":
                    one = replace(one, worker_type=WorkerType.PREFILL)
                elif state == "blocked":
                    one = replace(one, blocked=True)
                else:
                    one = replace(one, state=state)
                replicas.append(one)
            mixed = RoleModel("m", ReplicaState.READY, replicas=tuple(replicas))
            async with role(content(mixed)) as front:
                for _ in range(6):
                    assert (await front.ask(GENERATE, b"{}")).status == 200

    run(scenario())
    asked = {state: len(engine.asked) for state, engine in engines.items()}
    assert asked == {state: 6 if state is ReplicaState.READY else 0 for state in engines}


def test_i37_i42_a_model_with_prefill_and_decode_goes_through_its_router_only():
    router, prefill, decode = Engine(), Engine(), Engine()

    async def scenario():
        async with listening(router, prefill, decode):
            workers = tuple(
                RoleReplica(f"pd/{n}", url(engine.port), ReplicaState.READY, worker_type=kind)
                for n, (engine, kind) in enumerate(
                    ((prefill, WorkerType.PREFILL), (decode, WorkerType.DECODE))
                )
            )
            pd = routed("pd", router.port, replicas=workers)
            async with role(content(pd)) as front:
                body = b'{"model": "pd", "return_routed_experts": true}'
                answer = await front.ask(GENERATE, body)
                assert (answer.status, answer.headers["x-inference-model"]) == (200, "pd")
                front.change("pd", router_url=None)
                refused = await front.ask(GENERATE, body)
                assert refused.status == 503 and "retry-after" in refused.headers
                front.change("pd", route_mode=RouteMode.DIRECT)
                assert (await front.ask(GENERATE, body)).status == 503

    run(scenario())
    assert router.bodies == [b'{ "return_routed_experts": true}']
    assert prefill.asked == decode.asked == []


def test_i43_d4_no_replay_of_a_request_that_was_started():
    engines = [Dying(), Dying()]

    async def scenario():
        async with listening(*engines) as ports, role(content(model("m", *ports))) as front:
            for path, code in ((GENERATE, "bad_gateway"), (CHAT, "bad_gateway")):
                answer = await front.ask(path, b"{}")
                assert answer.status == 502 and ask_json(answer)["error"]["code"] == code
                assert "not sent again" in ask_json(answer)["error"]["message"]
                assert answer.headers["x-inference-model"] == "m"
                assert "retry-after" not in answer.headers
            assert front.in_flight == 0

    run(scenario())
    assert sum(len(engine.asked) for engine in engines) == 2


def test_d4_a_request_that_found_no_connection_is_sent_to_another_once():
    engine = Engine()

    async def scenario():
        async with listening(engine) as (port,):
            published = content(model("m", free_port(), port, free_port()))
            async with role(published) as front:
                for number in range(6):
                    body = json.dumps({"n": number}).encode()
                    answer = await front.ask(GENERATE, body)
                    assert answer.status in (200, 503), answer
                    if answer.status == 503:
                        assert "not started" in ask_json(answer)["error"]["message"]
                        assert answer.headers["retry-after"] == "1"
                    # Which do not listen is known after at most two of them were asked.
                    assert number < 2 or answer.status == 200
                return front.gateway.servers.traffic

    traffic = run(scenario())
    assert len(engine.asked) >= 5
    assert traffic.of("m/0").codes["503"] == 1 and traffic.of("m/2").codes["503"] == 1


def test_an_engine_that_did_not_listen_is_asked_again_after_a_moment():
    engine, other = Engine(port=free_port()), Engine()
    clock = ManualClock()

    async def scenario():
        published = content(model("m", engine.port, 1))
        async with listening(other) as (port,):
            replicas = (
                published.models[0].replicas[0],
                RoleReplica("m/1", url(port), ReplicaState.READY),
            )
            both = content(RoleModel("m", ReplicaState.READY, replicas=replicas))
            async with role(both, clock=clock) as front:
                for _ in range(4):
                    assert (await front.ask(GENERATE, b"{}")).status == 200
                assert len(other.asked) == 4
                async with listening(engine):
                    assert (await front.ask(GENERATE, b"{}")).status == 200
                    assert engine.asked == []
                    clock.advance(DOWN_S + 0.1)
                    for _ in range(2):
                        assert (await front.ask(GENERATE, b"{}")).status == 200
                    assert len(engine.asked) == 1

    run(scenario())


def test_the_only_engine_is_tried_again_though_it_did_not_listen():
    engine = Engine(port=free_port())

    async def scenario():
        async with role(content(model("m", engine.port)), clock=ManualClock()) as front:
            assert (await front.ask(GENERATE, b"{}")).status == 503
            assert front.gateway.servers.traffic.of("m/0").codes == {"503": 1}, "tried twice"
            async with listening(engine):
                assert (await front.ask(GENERATE, b"{}")).status == 200

    run(scenario())


def test_an_engine_that_is_late():
    class Silent(Engine):
        async def respond(self, writer):
            await asyncio.Event().wait()

    engine = Silent()

    async def scenario():
        limits = HttpLimits(response_timeout_s=0.05)
        async with listening(engine) as ports:
            async with role(content(model("m", *ports)), limits=limits) as front:
                answer = await front.ask(GENERATE, b"{}")
                assert answer.status == 504 and ask_json(answer)["error"]["code"] == "timeout"

    run(scenario())
    assert len(engine.asked) == 1


def test_i51_a_new_process_of_an_engine_begins_with_no_requests():
    class Held(Engine):
        def __init__(self):
            super().__init__()
            self.go_on = asyncio.Event()

        async def respond(self, writer):
            await self.go_on.wait()
            await super().respond(writer)

    old, new = Held(), Engine()

    async def scenario():
        async with listening(old, new) as (first, second):
            async with role(content(model("m", first))) as front:
                client = await front.connect()
                client.write(raw(GENERATE, b"{}"))
                await old.has_been_asked()
                again = RoleReplica("m/0", url(second), ReplicaState.READY, generation=1)
                front.change("m", replicas=(again,))
                load = front.gateway.servers.balancer.load
                assert load.count("m/0@1") == 0 and load.count("m/0@0") == 1
                assert (await front.ask(GENERATE, b"{}")).status == 200
                old.go_on.set()
                assert (await client.answer()).status == 200
                assert load.total == 0

    run(scenario())


def test_i41_the_gateway_sends_where_the_resolver_points():
    """That clients ask the same resolver is tested where it is."""
    engines = [Engine(), Engine()]
    hidden = content(RoleModel("m", ReplicaState.READY), expose_engine_urls=False)

    async def scenario():
        async with listening(*engines) as ports:
            published = replace(hidden, models=(model("m", *ports),))
            async with role(published) as front:
                target = resolve(front.registry.snapshot, RoleSelector(), direct=False)
                assert [each.base_url for each in target.candidates] == list(map(url, ports))
                for _ in range(2):
                    await front.ask(GENERATE, b"{}")

    run(scenario())
    assert [len(engine.asked) for engine in engines] == [1, 1]


def test_a_role_without_models_is_503():
    async def scenario():
        async with role(content(routing=RoutingSpec())) as front:
            return await front.ask(GENERATE, b"{}"), await front.ask(GENERATE, b'{"model":"m"}')

    early, named = run(scenario())
    assert early.status == 503 and ask_json(early)["state"] is None
    assert named.status == 400


@pytest.mark.parametrize("address", ["10.0.0.1:1", "http://a..b:80", "http://nowhere.invalid:80"])
def test_an_address_that_nothing_can_be_sent_to_is_503(address):
    async def scenario():
        broken = RoleReplica("m/0", address, ReplicaState.READY)
        async with role(content(RoleModel("m", ReplicaState.READY, replicas=(broken,)))) as front:
            answer = await front.ask(GENERATE, b"{}")
            assert front.in_flight == 0
            return answer

    assert run(scenario()).status == 503
