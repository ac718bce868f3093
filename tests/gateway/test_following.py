"""Several gateways with one pool: one says who is registered, the others have its servers."""

from __future__ import annotations

import asyncio
import json

import grpc.aio
import pytest

from phalanx.errors import ConfigurationError
from phalanx.gateway.gateway_url import GatewayUrl
from phalanx.routing.endpoint import Endpoint
from phalanx.wire import robot_inference as wire
from tests.gateway.policy_servers import HOST, infer, request, run
from tests.gateway.whole import ProbedServer, ask, asked, channel, ready, running, until


def url(gateway) -> str:
    return f"http://{HOST}:{gateway.http_port}"


def test_a_follower_has_the_servers_of_its_leader_and_probes_them_itself():
    async def scenario():
        server, other = ProbedServer(), ProbedServer()
        async with running(server) as leader, running(follow=url(leader)) as follower:
            await ready(follower, 1)
            assert follower.pool.snapshot.by_id.keys() == leader.pool.snapshot.by_id.keys()
            leader.pool.registry.register_self("pi05", await other.start())
            await ready(follower, 2)
            async with channel(follower) as client:
                for index in range(4):
                    await (await infer(client, request(f"r-{index}")))
            assert (len(server.requests), len(other.requests)) == (2, 2)
            [gone, _] = leader.pool.snapshot.by_id
            await ask(leader, "DELETE", f"/v1/backends/{gone}")
            await until(follower, None, gone)
            await ready(follower, 1)
            await other.stop()

    run(scenario())


def test_a_follower_keeps_its_servers_while_the_leader_is_away():
    async def scenario():
        server = ProbedServer()
        async with running(server) as leader, running(follow=url(leader)) as follower:
            await ready(follower, 1)
            port = leader.http_port
            await leader.close(drain_s=0.0)
            report = await asked(follower, "GET", "/v1/pool")
            while not report["follow_fault"]:
                report = await asked(follower, "GET", "/v1/pool")
            assert report["following"] == f"http://{HOST}:{port}"
            async with channel(follower) as client:
                await (await infer(client, request()))
            async with running(http_port=port) as again:
                again.pool.registry.register_managed("act", Endpoint.parse("127.0.0.1:1"))
                [known] = follower.pool.snapshot.by_id
                await until(follower, None, known)

    run(scenario())


def test_a_follower_keeps_its_servers_when_the_leader_has_lost_them():
    async def scenario():
        server = ProbedServer()
        async with running(server) as leader, running(follow=url(leader)) as follower:
            await ready(follower, 1)
            port = leader.http_port
            await leader.close(drain_s=0.0)
            async with running(http_port=port) as again:
                report = await asked(follower, "GET", "/v1/pool")
                while "started anew" not in report["follow_fault"]:
                    await asyncio.sleep(0)
                    report = await asked(follower, "GET", "/v1/pool")
                async with channel(follower) as client:
                    await (await infer(client, request()))
                again.pool.registry.register_managed("pi05", server.endpoint)
                while report["follow_fault"]:
                    report = await asked(follower, "GET", "/v1/pool")
                [known] = follower.pool.snapshot.by_id
                await ask(again, "DELETE", f"/v1/backends/{known}")
                await until(follower, None, known)

    run(scenario())


def test_servers_are_registered_with_the_leader():
    async def scenario():
        async with running() as leader, running(follow=url(leader)) as follower:
            body = {"model_name": "m", "endpoint": "127.0.0.1:1"}
            for answer in (
                await ask(follower, "POST", "/v1/backends", body),
                await ask(follower, "DELETE", "/v1/backends/x"),
            ):
                assert answer.status == 409
                assert url(leader) in json.loads(answer.body)["error"]["message"]
            async with grpc.aio.insecure_channel(f"{HOST}:{follower.grpc_port}") as client:
                asked_for = wire.Registration("127.0.0.1:1", "m")
                call = client.unary_unary(wire.REGISTER)
                answer = wire.decode_registration_answer(
                    await call(wire.encode_registration(asked_for))
                )
            assert not answer.accepted and url(leader) in answer.message

    run(scenario())


def test_a_leader_with_a_key_is_followed_with_it_and_a_wrong_one_is_told(caplog):
    async def scenario():
        async with running(ProbedServer(), admin_key="boss") as leader:
            async with running(follow=url(leader), admin_key="boss") as follower:
                await ready(follower, 1)
            async with running(follow=url(leader)) as follower:
                report = await asked(follower, "GET", "/v1/pool")
                while "--admin-key" not in report["follow_fault"]:
                    await asyncio.sleep(0)
                    report = await asked(follower, "GET", "/v1/pool")
                assert report["servers"] == []

    run(scenario())
    assert "none of its servers is known yet" in caplog.text


@pytest.mark.parametrize("text", ["127.0.0.1:1", "http://host", "http://host:1/x", "ftp://host:1"])
def test_an_address_that_is_no_gateways_is_refused(text):
    with pytest.raises(ConfigurationError, match="--follow|endpoint"):
        GatewayUrl.parse(text)


def test_a_gateway_may_be_behind_tls():
    assert GatewayUrl.parse("https://gw.lab:443/") == GatewayUrl("gw.lab", 443, True)
