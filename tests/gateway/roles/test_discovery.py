"""What a role tells of itself: engines, health and models, whatever its engines do."""

from __future__ import annotations

import asyncio
import gzip
import json
from dataclasses import replace

import pytest

from phalanx.routing.roles.documents import discovery, snapshot_of
from phalanx.routing.roles.snapshot import ReplicaState, RoleModel, RoleReplica
from phalanx.schema.roles import RouteMode, RoutingSpec, WorkerType
from phalanx.wire.discovery import decode_discovery
from tests.gateway.roles.running import (
    GENERATE,
    Engine,
    RoleFront,
    ask_json,
    content,
    listening,
    model,
    role,
    routed,
    run,
)

ENGINES, HEALTH = "/rollout/engines", "/rollout/health"


async def told(front: RoleFront, path: str = ENGINES) -> dict:
    answer = await front.ask(path)
    assert answer.status == 200, answer
    return ask_json(answer)


def test_i22_i44_i45_i46_i47_d10_d11_the_document_has_these_fields():
    routing = RoutingSpec(default_model="m", route_keys={"k": "m"}, aliases={"a": "m"})

    async def scenario():
        published = content(model("m", 1, 2), routing=routing, phase="deferred_score")
        async with role(published) as front:
            return await told(front)

    document = run(scenario())
    assert (document["role"], document["phase"]) == ("rollout", "deferred_score")
    assert (document["topology_revision"], document["registry_epoch"]) == (0, "epoch-1")
    assert document["routing"] == {
        "default_model": "m",
        "route_keys": {"k": "m"},
        "aliases": {"a": "m"},
        "policy": "least_in_flight",
        "on_unmapped_route_key": "refuse",
    }
    shown = document["models"]["m"]
    assert (shown["state"], shown["router_url"], shown["route_mode"]) == ("ready", None, "direct")
    first = shown["engines"][0]
    assert first["engine_id"] == "m/0" and first["base_url"] == "http://127.0.0.1:1"
    assert first["state"] == "ready" and first["direct_eligible"] is True
    assert first["generation"] == 0
    assert "stale" not in document


@pytest.mark.parametrize("state", list(ReplicaState))
def test_i53_only_ready_engines_are_direct_eligible(state):
    async def scenario():
        async with role(content(model("m", 1, state=state))) as front:
            return (await told(front))["models"]["m"]["engines"][0]

    assert run(scenario())["direct_eligible"] is (state is ReplicaState.READY)


def test_i18_d1_engines_that_are_not_shown_serve_through_the_gateway_alone():
    engine = Engine()

    async def scenario():
        async with listening(engine) as ports:
            hidden = content(model("m", *ports), expose_engine_urls=False)
            async with role(hidden) as front:
                document = (await front.ask(ENGINES)).body
                assert (await front.ask(GENERATE, b"{}")).status == 200
                old = (await front.ask(ENGINES + "?schema=1")).body
                for body in (document, old):
                    assert str(ports[0]).encode() not in body
                one = json.loads(document)["models"]["m"]["engines"][0]
                assert one["base_url"] is None and one["direct_eligible"] is False

    run(scenario())
    assert len(engine.asked) == 1


def test_i49_i50_one_engine_a_replica_and_workers_of_a_pair_are_shown_not_eligible():
    workers = tuple(
        RoleReplica(f"pd/{n}", f"http://10.0.0.{n}:1", ReplicaState.READY, worker_type=kind)
        for n, kind in enumerate((WorkerType.PREFILL, WorkerType.DECODE))
    )

    async def scenario():
        pd = routed("pd", 9, replicas=workers)
        async with role(content(pd, model("big", 1))) as front:
            document = await told(front)
            assert document["models"]["pd"]["router_url"] == "http://127.0.0.1:9"
            assert [
                (each["worker_type"], each["direct_eligible"])
                for each in document["models"]["pd"]["engines"]
            ] == [("prefill", False), ("decode", False)]
            # A replica of several ranks is one entry, at its head.
            assert len(document["models"]["big"]["engines"]) == 1
            old = await told(front, ENGINES + "?schema=1")
            assert old["models"]["pd"]["engine_groups"] == []
            assert (old["models"]["pd"]["router_ip"], old["models"]["pd"]["router_port"]) == (
                "127.0.0.1",
                9,
            )

    run(scenario())


def test_i51_i52_the_revision_grows_with_each_change_and_never_else():
    first, second = model("m", 1).replicas[0], model("m", 1, 2).replicas[1]
    changes = {
        "scale-out": (first, second),
        "scale-in": (first,),
        "restart": (replace(first, generation=1),),
        "recovery": (replace(first, generation=1, state=ReplicaState.STARTING),),
        "endpoint": (replace(first, generation=1, base_url="http://127.0.0.1:7"),),
    }

    async def scenario():
        async with role(content(model("m", 1))) as front:
            for number, replicas in enumerate(changes.values()):
                assert (await told(front))["topology_revision"] == number
                assert (await told(front))["topology_revision"] == number
                front.change("m", replicas=replicas)
                front.change("m", replicas=replicas)
            assert (await told(front))["topology_revision"] == len(changes)

    run(scenario())


def test_i54_a_document_is_of_one_snapshot_and_encoded_once():
    async def scenario():
        async with role(content(model("m", 1))) as front:
            before = front.registry.snapshot
            body = (await front.ask(ENGINES)).body
            front.change("m", state=ReplicaState.DRAINING, replicas=())
            after = (await front.ask(ENGINES)).body
            assert decode_discovery(body) == discovery(before)
            assert snapshot_of(decode_discovery(after)).content.models[0].replicas == ()

    run(scenario())


def test_a_reader_waits_for_the_next_change():
    async def scenario():
        async with role(content(model("m", 1))) as front:
            # Another revision, or another epoch, is answered at once.
            assert (await told(front, f"{ENGINES}?after=9&wait_s=60"))["topology_revision"] == 0
            assert await told(front, f"{ENGINES}?after=0&epoch=other&wait_s=60")
            assert (await told(front, f"{ENGINES}?after=0&wait_s=0.01"))["topology_revision"] == 0
            waiting = [
                asyncio.create_task(told(front, f"{ENGINES}?after=0&epoch=epoch-1&wait_s=60"))
                for _ in range(50)
            ]
            # The registry tells nobody who waits.
            while front.registry.num_waiting < 50:  # noqa: ASYNC110
                await asyncio.sleep(0)
            front.change("m", replicas=())
            assert {each["topology_revision"] for each in await asyncio.gather(*waiting)} == {1}
            last = asyncio.create_task(told(front, f"{ENGINES}?after=1&wait_s=60"))
            while front.registry.num_waiting < 1:  # noqa: ASYNC110
                await asyncio.sleep(0)
            front.gateway.close()
            assert (await last)["topology_revision"] == 1

    run(scenario())


@pytest.mark.parametrize(
    "query", ["after=x", "after=-1", "after=0&wait_s=61", "wait_s=abc", "schema=3"]
)
def test_queries_that_mean_nothing_are_400(query):
    async def scenario():
        async with role(content(model("m", 1))) as front:
            return await front.ask(f"{ENGINES}?{query}")

    answer = run(scenario())
    assert answer.status == 400 and ask_json(answer)["error"]["message"]


def test_a_large_document_is_compressed_for_who_takes_it():
    async def scenario():
        async with role(content(model("m", *range(1, 200)))) as front:
            plain = await front.ask(ENGINES, accept_encoding="br, identity")
            small = await front.ask(ENGINES, accept_encoding="deflate, gzip;q=1, gzip")
            assert "content-encoding" not in plain.headers
            assert small.headers["content-encoding"] == "gzip"
            assert gzip.decompress(small.body) == plain.body
            assert len(small.body) * 5 < len(plain.body)

    run(scenario())


def test_i55_the_old_form_is_there_for_its_readers():
    async def scenario():
        published = content(model("m", 1, 2), routed("r", 9), model("empty"))
        async with role(published) as front:
            front.change(
                "m",
                replicas=(
                    published.models[0].replicas[0],
                    replace(published.models[0].replicas[1], state=ReplicaState.STARTING),
                ),
            )
            whole = await told(front, f"{ENGINES}?schema=1")
            one = await told(front, f"{ENGINES}?schema=1&model_name=m")
            unknown = await front.ask(f"{ENGINES}?schema=1&model_name=x")
            return whole, one, unknown

    whole, one, unknown = run(scenario())
    assert whole["total_engines"] == 2 and set(whole["models"]) == {"m", "r", "empty"}
    assert one == {"models": {"m": whole["models"]["m"]}, "total_engines": 2}
    shown = one["models"]["m"]
    assert (shown["router_ip"], shown["router_port"], shown["total_engines"]) == (None, None, 2)
    (group,) = shown["engine_groups"]
    assert (group["group_index"], group["num_new_engines"]) == (0, 1)
    assert [(each["rank"], each["status"], each["url"]) for each in group["engines"]] == [
        (0, "ready", "http://127.0.0.1:1"),
        (1, "starting", "http://127.0.0.1:2"),
    ]
    assert (whole["models"]["r"]["router_ip"], whole["models"]["r"]["router_port"]) == (
        "127.0.0.1",
        9,
    )
    assert unknown.status == 400 and "'m'" in ask_json(unknown)["error"]["message"]


def test_i23_d12_health_is_200_while_the_gateway_works():
    async def scenario():
        published = content(model("a", 1), model("b", 2, state=ReplicaState.SLEEPING), phase="x")
        async with role(published) as front:
            health = await told(front, HEALTH)
            assert (health["status"], health["ready"], health["phase"]) == ("ok", False, "x")
            assert health["models"]["a"] == {
                "state": "ready",
                "ready": True,
                "replicas": {"ready": 1},
            }
            assert health["models"]["b"]["ready"] is False
            statuses = {
                query: (await front.ask(HEALTH + query)).status
                for query in ("", "?ready=0", "?ready=1", "?ready=1&model=a", "?ready=1&model=b")
            }
            assert statuses == {
                "": 200,
                "?ready=0": 200,
                "?ready=1": 503,
                "?ready=1&model=a": 200,
                "?ready=1&model=b": 503,
            }
            assert (await front.ask(HEALTH + "?ready=1&model=none")).status == 503
            refused = await front.ask(HEALTH + "?ready=1")
            assert refused.headers["retry-after"] == "1" and ask_json(refused)["role"] == "rollout"
            front.change("b", state=ReplicaState.READY)
            assert (await front.ask(HEALTH + "?ready=1")).status == 503, "no replica of it is"
            front.change("b", replicas=model("b", 2).replicas)
            assert (await front.ask(HEALTH + "?ready=1")).status == 200

    run(scenario())


@pytest.mark.parametrize("state", list(ReplicaState))
def test_i3_everything_is_answered_whatever_the_engines_do(state):
    async def scenario():
        async with role(content(model("m", 1, state=state))) as front:
            assert (await told(front))["models"]["m"]["state"] == state
            assert (await told(front, HEALTH))["models"]["m"]["state"] == state
            assert (await told(front, "/rollout/v1/models"))["data"][0]["id"] == "m"
            client = await front.connect()
            for path in (ENGINES, HEALTH):
                client.write(f"HEAD {path} HTTP/1.1\r\nhost: a\r\n\r\n".encode())
                answer = await client.answer(without_body=True)
                assert answer.status == 200 and int(answer.headers["content-length"]) > 0

    run(scenario())


def test_i3_a_role_whose_manager_is_gone_goes_on_with_its_last_snapshot():
    engine = Engine()

    async def scenario():
        async with listening(engine) as ports:
            async with role(content(model("m", *ports)), lost="it is gone") as front:
                document = await told(front)
                assert document["stale"] == "it is gone"
                assert decode_discovery(json.dumps(document).encode()).models["m"].engines
                assert (await told(front, HEALTH))["manager_fault"] == "it is gone"
                assert (await front.ask(GENERATE, b"{}")).status == 200

    run(scenario())


def test_i24_the_models_are_listed_as_openai_does():
    async def scenario():
        routing = RoutingSpec(aliases={"judge": "b"})
        published = content(model("a", 1), RoleModel("b", ReplicaState.DEAD), routing=routing)
        async with role(published) as front:
            b = await front.ask("/rollout/v1/models/b")
            assert ask_json(b)["id"] == "b" and ask_json(b)["object"] == "model"
            assert ask_json(await front.ask("/rollout/v1/models/%6audge"))["id"] == "judge"
            unknown = await front.ask("/rollout/v1/models/c")
            assert (
                unknown.status == 404 and "known: 'a', 'b'" in ask_json(unknown)["error"]["message"]
            )
            assert (await front.ask("/rollout/v1/models/b", b"{}")).status == 405
            return await told(front, "/rollout/v1/models")

    listed = run(scenario())
    assert listed["object"] == "list"
    assert [each["id"] for each in listed["data"]] == ["a", "b", "judge"]
    assert all(each["object"] == "model" and each["created"] > 0 for each in listed["data"])


def test_discovery_wants_the_key_of_who_uses_models():
    async def scenario():
        async with role(content(model("m", 1)), api_key="use", admin_key="run") as front:
            for path in (ENGINES, HEALTH, "/rollout/v1/models"):
                assert (await front.ask(path)).status == 401
                for key in ("use", "run"):
                    given = f"Bearer {key}"
                    assert (await front.ask(path, authorization=given)).status == 200

    run(scenario())


def test_a_model_behind_a_router_is_ready_once_it_has_one():
    async def scenario():
        pd = RoleModel("r", ReplicaState.READY, RouteMode.SGLANG_ROUTER)
        async with role(content(pd)) as front:
            assert (await front.ask(HEALTH + "?ready=1")).status == 503
            front.change("r", router_url="http://127.0.0.1:1")
            assert (await front.ask(HEALTH + "?ready=1")).status == 200

    run(scenario())
