"""The operator's routes: what they answer, what they refuse, and who may ask."""

from __future__ import annotations

import asyncio
import json

import grpc
import pytest

from phalanx.routing.snapshot import ServerState
from phalanx.wire import robot_inference as wire
from tests.gateway.http.running import Client
from tests.gateway.http.running import request as request_of
from tests.gateway.policy_servers import HOST, failure, infer, request, run
from tests.gateway.whole import ProbedServer, ask, asked, channel, ready, running, until


def test_r102_a_server_is_added_listed_and_removed():
    async def scenario():
        server = ProbedServer()
        endpoint = str(await server.start())
        async with running() as gateway:
            body = {"model_name": "pi05", "endpoint": "grpc://" + endpoint}
            added = await ask(gateway, "POST", "/v1/backends", body)
            assert added.status == 202
            description = json.loads(added.body)
            assert description.keys() == {
                "server_id",
                "model_name",
                "endpoint",
                "healthy",
                "in_flight_requests",
            }
            assert description["endpoint"] == endpoint
            again = await asked(gateway, "POST", "/v1/backends", {**body, "endpoint": endpoint})
            assert again["server_id"] == description["server_id"]
            await ready(gateway, 1)
            listed = await asked(gateway, "GET", "/v1/backends")
            assert listed == {"backends": [{**description, "healthy": True}]}
            gone = f"/v1/backends/{description['server_id']}"
            removed = await ask(gateway, "DELETE", gone)
            assert (removed.status, removed.body) == (204, b"")
            assert (await ask(gateway, "DELETE", gone)).status == 404
            assert await asked(gateway, "GET", "/v1/backends") == {"backends": []}
        await server.stop()

    run(scenario())


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"{", 400, "is not JSON"),
        (b"\xff", 400, "is not JSON"),
        ({"model_name": "m"}, 422, "endpoint"),
        ({"model_name": "m", "endpoint": 5}, 422, "Expected `str`"),
        ({"model_name": "m", "endpoint": "host"}, 422, "has no port"),
        ({"model_name": "", "endpoint": "host:1"}, 422, "model name"),
        ({"model_name": "m", "endpoint": "host:1", "weight": 3}, 422, "unknown field `weight`"),
    ],
)
def test_a_registration_that_cannot_be_is_refused_in_words(body, status, says):
    async def scenario():
        async with running() as gateway:
            answer = await ask(gateway, "POST", "/v1/backends", body)
            assert answer.status == status
            error = json.loads(answer.body)["error"]
            assert says in error["message"]
            assert gateway.pool.snapshot.servers == ()

    run(scenario())


def test_health_is_the_gateways_and_ready_that_of_its_servers():
    async def scenario():
        server = ProbedServer()
        async with running() as gateway:
            assert await asked(gateway, "GET", "/health") == {"status": "ok"}
            unready = await ask(gateway, "GET", "/ready")
            assert (unready.status, unready.headers["retry-after"]) == (503, "1")
            assert json.loads(unready.body)["detail"] == "no server is registered"
            body = {"model_name": "pi05", "endpoint": str(await server.start())}
            await asked(gateway, "POST", "/v1/backends", body)
            await ready(gateway, 1)
            answer = await asked(gateway, "GET", "/ready")
            assert answer == {"status": "ready", "num_servers": 1, "num_ready": 1}
            other = await ask(gateway, "GET", "/ready?model=act")
            assert json.loads(other.body)["detail"] == "no server of model 'act' is registered"
            await server.stop()
            await until(gateway, ServerState.UNHEALTHY)
            unready = await ask(gateway, "GET", "/ready?model=pi05")
            assert unready.status == 503
            assert json.loads(unready.body)["detail"] == (
                "no server of model 'pi05' is ready: 1 unhealthy"
            )
            assert await asked(gateway, "GET", "/health") == {"status": "ok"}

    run(scenario())


def test_the_pool_is_reported_with_what_requests_came_to():
    async def scenario():
        server = ProbedServer()
        async with running(server) as gateway, channel(gateway) as client:
            await ready(gateway, 1)
            for index in range(3):
                await (await infer(client, request(f"r-{index}")))
            report = await asked(gateway, "GET", "/v1/pool")
            [shown] = report["servers"]
            assert (shown["num_requests"], shown["num_failed"]) == (3, 0)
            assert (shown["state"], shown["healthy"], shown["scheme"]) == ("ready", True, "grpc")
            assert 0 < shown["latency_ms"]["p50"] <= shown["latency_ms"]["p99"]
            assert shown["queue_ms"]["p50"] is not None, "the server says what its model took"
            assert len(shown["per_second"]) == 60
            assert [event["state"] for event in report["events"]] == ["starting", "ready"]
            assert report["revision"] == gateway.pool.snapshot.revision
            plain = await asked(gateway, "GET", "/v1/pool?detail=0")
            assert plain.keys() == {"epoch", "revision", "servers"}

    run(scenario())


def test_a_failed_request_is_reported_with_its_words():
    async def scenario():
        server = ProbedServer()

        async def fail(data, context):
            raise ValueError("the arm is on fire")

        server.behave = fail
        async with running(server) as gateway, channel(gateway) as client:
            await ready(gateway, 1)
            await asyncio.gather(await infer(client, request()), return_exceptions=True)
            report = await asked(gateway, "GET", "/v1/pool")
            [failure] = report["failures"]
            assert (failure["code"], failure["model_name"]) == ("UNKNOWN", "pi05")
            assert "on fire" in failure["message"]
            assert report["servers"][0]["num_failed"] == 1

    run(scenario())


def test_the_pool_is_watched_without_polling():
    async def scenario():
        async with running() as gateway:
            now = await asked(gateway, "GET", "/v1/pool")
            target = f"/v1/pool?after={now['revision']}&wait_s=30&detail=0"
            watching = asyncio.create_task(asked(gateway, "GET", target))
            at_once = await asked(gateway, "GET", target + "&epoch=another")
            assert at_once["epoch"] == now["epoch"]
            assert not watching.done()
            body = {"model_name": "m", "endpoint": "127.0.0.1:1"}
            await asked(gateway, "POST", "/v1/backends", body)
            changed = await watching
            assert changed["revision"] > now["revision"]
            assert [server["model_name"] for server in changed["servers"]] == ["m"]

    run(scenario())


def test_watchers_are_answered_when_the_gateway_closes():
    async def scenario():
        async with running() as gateway:
            client = Client(*await asyncio.open_connection(HOST, gateway.http_port))
            watch = request_of("GET", "/v1/pool?after=0&wait_s=60")
            client.write(request_of("GET", "/health") + watch)
            await client.answer()
            # Both came together, so that the second is being answered now.
            await gateway.close(drain_s=20.0)
            assert json.loads((await client.answer()).body)["draining"] is True
            client.close()

    run(scenario())


@pytest.mark.parametrize("query", ["after=x", "after=-1", "after=1&wait_s=61", "after=1&wait_s=no"])
def test_a_watch_that_makes_no_sense_is_refused(query):
    async def scenario():
        async with running() as gateway:
            assert (await ask(gateway, "GET", f"/v1/pool?{query}")).status == 400

    run(scenario())


def test_each_key_opens_its_own_doors():
    async def scenario():
        async with running(api_key="user", admin_key="boss") as gateway:

            async def status(target: str, key: str | None, method: str = "GET") -> int:
                return (await ask(gateway, method, target, key=key)).status

            for target in ("/", "/health"):
                assert await status(target, None) == 200
            for target in ("/v1/backends", "/v1/pool", "/metrics"):
                assert [await status(target, key) for key in (None, "user", "boss")] == [
                    401,
                    401,
                    200,
                ]
            assert await status("/v1/backends/x", "user", "DELETE") == 401
            assert await status("/v1/chat", None) == 401

    run(scenario())


@pytest.mark.parametrize("keys", [{"admin_key": "one"}, {"api_key": "one"}])
def test_a_single_key_is_for_everything(keys):
    async def scenario():
        async with running(ProbedServer(), **keys) as gateway, channel(gateway) as client:
            await ready(gateway, 1)
            for target in ("/v1/pool", "/v1/chat"):
                assert (await ask(gateway, "GET", target)).status == 401
                assert (await ask(gateway, "GET", target, key="one")).status != 401
            refused = await failure(await infer(client, request()))
            assert refused.code() is grpc.StatusCode.UNAUTHENTICATED
            call = client.unary_unary(wire.INFER)
            await call(request(), metadata=(("authorization", "Bearer one"),))

    run(scenario())


def test_the_metrics_say_who_did_what():
    async def scenario():
        server = ProbedServer()
        async with running(server) as gateway, channel(gateway) as client:
            await ready(gateway, 1)
            await (await infer(client, request()))
            text = (await ask(gateway, "GET", "/metrics")).body.decode()
            labels = f'model="pi05",server="{server.endpoint}"'
            prefix = "phalanx_gateway_"
            assert f'{prefix}requests_total{{code="OK",{labels}}} 1.0' in text
            assert f"{prefix}in_flight_requests{{{labels}}} 0.0" in text
            assert f'{prefix}server_state{{{labels},state="ready"}} 1.0' in text
            assert f'{prefix}request_seconds_bucket{{le="+Inf",{labels}}} 1.0' in text
            assert f"{prefix}queue_seconds_count{{{labels}}} 1.0" in text
            assert f'{prefix}request_quantile_seconds{{model="pi05",quantile="0.99",' in text
            text = (await ask(gateway, "GET", "/metrics")).body.decode()
            assert f'{prefix}http_requests_total{{route="handler",status="200"}} 1.0' in text

    run(scenario())


def test_a_web_page_of_another_origin_adds_no_server():
    async def scenario():
        body = {"model_name": "pi05", "endpoint": "203.0.113.9:50063"}
        async with running() as gateway:

            async def status(target, *fields, method="POST", body=body):
                return (await ask(gateway, method, target, body, fields=fields)).status

            target, json_type = "/v1/backends", "content-type: application/json"
            assert await status(target, "content-type: text/plain;charset=UTF-8") == 415
            assert await status(target) == 415
            assert await status(f"{target}/x", "content-type: text/plain", method="DELETE") == 415
            for origin in ("https://evil.example", "null", "http://gateway:1", "gateway"):
                assert await status(target, json_type, f"origin: {origin}") == 403
            assert gateway.pool.snapshot.servers == ()
            for read in ("/v1/pool", "/v1/backends", "/metrics"):
                foreign = "origin: http://evil.example"
                assert await status(read, foreign, method="GET", body=None) == 403
            socket = ("connection: upgrade", "upgrade: websocket", "origin: http://evil.example")
            assert await status("/", *socket, method="GET", body=None) == 403
            assert await status(target, json_type, "origin: http://Gateway") == 202
            assert await status("/", "origin: http://evil.example", method="GET", body=None) == 200

    run(scenario())
