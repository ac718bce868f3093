"""A whole gateway that follows a control process, which comes, changes, goes and comes again."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from phalanx.errors import ConfigurationError
from phalanx.gateway.config import GatewayConfig
from phalanx.routing.roles.registry import RoleRegistry
from phalanx.schema.roles import RoutingSpec, WorkloadType
from tests.gateway import whole
from tests.gateway.roles.control import Control, hearing
from tests.gateway.roles.running import Engine, content, listening, model, run
from tests.gateway.roles.test_judge import completion
from tests.gateway.roles.test_refusing import free_port


@asynccontextmanager
async def following(control: Control, **changes: object):
    """A gateway that follows it, and what it says."""
    async with hearing() as heard, whole.running(roles=control.url, **changes) as gateway:
        try:
            yield gateway, heard
        finally:
            await control.stop()


async def asked(gateway, path: str, body: object = None, key: str | None = None):
    method = "GET" if body is None else "POST"
    return await whole.ask(gateway, method, path, body, key=key)


async def told(gateway, path: str) -> dict:
    answer = await asked(gateway, path)
    assert answer.status == 200, answer
    return json.loads(answer.body)


def test_i1_one_gateway_serves_every_role_of_a_job():
    engines = {"rollout": Engine(), "genrm": Engine(completion("good")), "teacher": Engine()}

    async def scenario():
        async with listening(*engines.values()) as (rollout, genrm, teacher):
            control = Control(
                rollout=content(model("student", rollout)),
                genrm=content(model("judge", genrm), workload=WorkloadType.GENRM),
                teacher=content(model("big", teacher), workload=WorkloadType.TEACHER),
            )
            await control.start()
            async with following(control) as (gateway, heard):
                for role in engines:
                    await heard.of("following role")
                    assert role in control.registries
                for role in engines:
                    body = {"messages": [{"role": "user", "content": "x"}]}
                    answer = await asked(gateway, f"/{role}/generate", body)
                    assert answer.status == 200
                    assert (json.loads(answer.body) == {"response": "good"}) is (role == "genrm")
                    assert (await told(gateway, f"/{role}/engines"))["role"] == role
                assert (await asked(gateway, "/other/generate", {})).status == 404
                for body, status in (({}, 503), ({"model": "judge"}, 404)):
                    lost = await asked(gateway, "/v1/chat/completions", body)
                    assert lost.status == status
                    assert "/genrm/v1" in json.loads(lost.body)["error"]["message"]

    run(scenario())
    # A teacher's URL is one of the gateway's as well as one of an engine's.
    assert engines["teacher"].asked[0][0].startswith(b"POST /generate ")


def test_i3_the_gateway_is_there_before_its_control_process_and_after_it():
    engine, other = Engine(), Engine()

    async def scenario():
        async with listening(engine, other) as (port, second):
            control = Control(rollout=content(model("m", port)))
            control.port = free_port()
            async with following(control) as (gateway, heard):
                early = await asked(gateway, "/rollout/generate", {})
                assert early.status == 503 and early.headers["retry-after"] == "1"
                assert b"control process" in early.body
                assert (await asked(gateway, "/rollout/else", {})).status == 404
                assert (await told(gateway, "/health"))["status"] == "ok"
                assert (await asked(gateway, "/ready")).status == 503

                await control.start(control.port)
                await heard.of("following role")
                assert (await asked(gateway, "/rollout/generate", {})).status == 200
                for path, status in (("", 200), ("?model=m", 200), ("?model=x", 503)):
                    assert (await asked(gateway, "/ready" + path)).status == status
                control.publish("rollout", content(model("m", port, second)))
                changed = await told(gateway, "/rollout/engines?after=0&epoch=e1&wait_s=60")
                assert len(changed["models"]["m"]["engines"]) == 2

                await control.stop()
                assert "last snapshot stays" in await heard.of("role rollout")
                stale = await told(gateway, "/rollout/engines")
                assert stale["topology_revision"] == 1 and "not heard" in stale["stale"]
                assert "not heard" in (await told(gateway, "/rollout/health"))["manager_fault"]
                assert (await asked(gateway, "/rollout/generate", {})).status == 200

                again = Control(epoch="e2", rollout=content(model("m", second)))
                await again.start(control.port)
                try:
                    await heard.of("following role")
                    fresh = await told(gateway, "/rollout/engines")
                    assert (fresh["registry_epoch"], fresh["topology_revision"]) == ("e2", 0)
                    assert "stale" not in fresh
                finally:
                    await again.stop()

    run(scenario())


def test_a_role_that_was_never_heard_has_no_snapshot_that_could_stay():
    async def scenario():
        control = Control(rollout=content(model("m")), genrm=content(model("j")))
        control.untold = "genrm"
        await control.start()
        async with following(control) as (_, heard):
            assert "answered 404; nothing is known of it" in await heard.of("role genrm")

    run(scenario())


def test_a_role_that_comes_later_is_served():
    async def scenario():
        first = Control(rollout=content(model("m")))
        await first.start()
        async with following(first) as (gateway, heard):
            await heard.of("following role")
            await first.stop()
            await heard.of("stays")
            both = Control(epoch="e2", rollout=content(model("m")), genrm=content(model("j")))
            await both.start(first.port)
            try:
                assert "genrm" in await heard.of("following role genrm")
                assert (await told(gateway, "/genrm/engines"))["registry_epoch"] == "e2"
            finally:
                await both.stop()

    run(scenario())


def test_keys_of_both_sides():
    async def scenario():
        control = Control(key="inner", rollout=content(model("m")))
        await control.start()
        async with following(control, roles_key="wrong", api_key="use", admin_key="run") as (
            gateway,
            heard,
        ):
            await heard.of("--roles-key")
            refused = await asked(gateway, "/rollout/engines", key="use")
            assert refused.status == 503 and b"--roles-key" in refused.body
        await control.start(control.port)
        async with following(control, roles_key="inner", api_key="use", admin_key="run") as (
            gateway,
            heard,
        ):
            await heard.of("following role")
            for path, key, status in (
                ("/rollout/engines", None, 401),
                ("/rollout/engines", "use", 200),
                ("/v1/roles", "use", 401),
                ("/v1/roles", "run", 200),
            ):
                assert (await asked(gateway, path, key=key)).status == status, path

    run(scenario())


def test_the_board_shows_roles_requests_and_events():
    engine = Engine()

    async def scenario():
        async with listening(engine) as ports:
            published = content(model("m", *ports), routing=RoutingSpec(aliases={"a": "m"}))
            control = Control(rollout=published)
            await control.start()
            async with following(control) as (gateway, heard):
                await heard.of("following role")
                assert (await told(gateway, "/v1/pool"))["roles"] is True
                for _ in range(3):
                    assert (await asked(gateway, "/rollout/generate", {})).status == 200
                control.happen("state", "ready")
                control.happen("state", "draining")
                # The page that shows them asks again and again too.
                while len((await told(gateway, "/v1/roles"))["events"]) < 2:
                    pass
                board = await told(gateway, "/v1/roles")
                assert [each["detail"] for each in board["events"]] == ["ready", "draining"]
                (role,) = board["roles"]
                assert role["role"] == "rollout" and role["source_fault"] == ""
                one = role["models"]["m"]["engines"][0]
                assert one["base_url"] == f"http://127.0.0.1:{engine.port}"
                assert role["in_flight"] == {"m/0": 0}
                assert role["requests"]["m/0"]["num_requests"] == 3
                await control.stop()
                await heard.of("stays")
                await control.start(control.port)
                await heard.of("following role")
                control.happen("state", "sleeping")
                while len((board := await told(gateway, "/v1/roles"))["events"]) < 3:
                    pass
                details = [each["detail"] for each in board["events"]]
                assert details == ["ready", "draining", "sleeping"], "they were told twice"
                metrics = (await asked(gateway, "/metrics")).body.decode()
                for line in (
                    'phalanx_gateway_role_requests_total{code="200",engine="m/0",model="m",'
                    'role="rollout"} 3.0',
                    'phalanx_gateway_role_in_flight_requests{engine="m/0",model="m",'
                    'role="rollout"} 0.0',
                    'phalanx_gateway_role_engine_state{engine="m/0",model="m",role="rollout",'
                    'state="ready"} 1.0',
                    'phalanx_gateway_role_topology_revision{role="rollout"} 0.0',
                    'phalanx_gateway_role_manager_heard{role="rollout"} 1.0',
                ):
                    assert line in metrics, line

    run(scenario())


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"roles": "127.0.0.1:1"}, "--roles"),
        ({"roles": "http://127.0.0.1:1/x"}, "control process"),
        ({"roles_key": "k"}, "--roles-key needs --roles"),
        ({"roles": "http://127.0.0.1:1", "roles_key": ""}, "--roles-key"),
    ],
)
def test_a_configuration_that_cannot_be(changes, word):
    with pytest.raises(ConfigurationError, match=word):
        GatewayConfig(**changes)


def test_a_role_of_the_same_process_is_served_and_its_registry_stays_its_own():
    engine = Engine()

    async def scenario():
        async with listening(engine) as ports:
            registry = RoleRegistry("rollout", "own", content(model("m")))
            async with whole.running() as gateway:
                assert (await told(gateway, "/v1/pool"))["roles"] is False
                gateway.roles.serve("rollout", registry)
                assert (await told(gateway, "/v1/pool"))["roles"] is True
                assert (await asked(gateway, "/rollout/generate", {})).status == 503
                assert registry.publish(content(model("m", *ports)), 0)
                assert (await asked(gateway, "/rollout/generate", {})).status == 200
            waiting = asyncio.create_task(registry.wait(1, 60.0))
            await asyncio.sleep(0)
            assert registry.publish(content(model("m")), 1)
            assert (await waiting).revision == 2, "the gateway has closed it"

    run(scenario())
