"""What a probe finds at servers that answer, refuse, say something else, or are not there."""

from __future__ import annotations

import asyncio

import pytest

from phalanx.gateway.health_check import GrpcHealthCheck, HttpHealthCheck
from phalanx.routing.endpoint import Endpoint
from phalanx.routing.registration import Probe
from phalanx.routing.snapshot import Server
from tests.gateway.http.running import answering, backend
from tests.gateway.policy_servers import HOST, FakePolicyServer, run
from tests.gateway.whole import ProbedServer


def server_at(endpoint: Endpoint | str) -> Server:
    where = Endpoint.parse(endpoint) if isinstance(endpoint, str) else endpoint
    return Server("s", "pi05", where)


def test_a_grpc_server_is_asked_for_its_model_and_found_again_after_a_restart():
    async def scenario():
        check, server = GrpcHealthCheck(), ProbedServer()
        where = server_at(await server.start())
        assert await check.check(where) == (Probe.HEALTHY, "")
        server.healthy = False
        assert await check.check(where) == (
            Probe.FAILED,
            "CheckHealth says that it is not healthy",
        )
        assert server.asked == ["pi05", "pi05"]
        await server.stop()
        assert await check.check(where) == (Probe.UNREACHABLE, "connection refused")
        again = ProbedServer(port=where.endpoint.port)
        await again.start()
        assert await check.check(where) == (Probe.HEALTHY, ""), "at once, without a back-off"
        await check.close()
        await again.stop()

    run(scenario())


def test_a_grpc_server_without_the_method_is_told_from_one_that_is_not_there():
    async def scenario():
        check, server = GrpcHealthCheck(), FakePolicyServer()
        probe, words = await check.check(server_at(await server.start()))
        assert probe is Probe.FAILED
        assert words.startswith("CheckHealth: UNIMPLEMENTED")
        await check.close()
        await server.stop()

    run(scenario())


def test_a_host_that_does_not_exist_is_unreachable():
    async def scenario():
        check = GrpcHealthCheck()
        finding = await check.check(server_at("no-such-host.invalid:1"))
        assert finding == (Probe.UNREACHABLE, "its host name is not known")

    run(scenario())


@pytest.mark.parametrize(
    ("response", "finding"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", (Probe.HEALTHY, "")),
        (b"HTTP/1.1 204 No Content\r\n\r\n", (Probe.HEALTHY, "")),
        (b"HTTP/1.0 200 OK\r\n\r\nfine", (Probe.HEALTHY, "")),
        (
            b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n",
            (Probe.FAILED, "GET /alive answered 503"),
        ),
        (b"SSH-2.0-x\r\n", (Probe.FAILED, "GET /alive: the answer is not HTTP")),
        (
            b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
            (Probe.FAILED, "GET /alive: it answered with another protocol"),
        ),
        (b"", (Probe.FAILED, "GET /alive: the answer broke off")),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n12", (Probe.FAILED, "GET /alive: the answ")),
    ],
)
def test_an_http_server_is_healthy_that_answers_with_success(response, finding):
    async def scenario():
        async def script(reader, writer):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"GET /alive HTTP/1.1\r\nhost: ")
            writer.write(response)

        async with backend(script) as served:
            where = server_at(f"http://{HOST}:{served.port}")
            probe, words = await HttpHealthCheck("/alive").check(where)
            assert (probe, words[: len(finding[1])]) == finding

    run(scenario())


def test_an_http_server_that_is_gone_is_unreachable():
    async def scenario():
        async with backend(answering(b"")) as served:
            port = served.port
        finding = await HttpHealthCheck().check(server_at(f"http://{HOST}:{port}"))
        assert finding == (Probe.UNREACHABLE, "connection refused")

    run(scenario())


def test_a_server_that_asks_for_a_key_gets_it():
    async def scenario():
        seen = asyncio.get_running_loop().create_future()

        class Keyed(ProbedServer):
            async def _check_health(self, data, context):
                seen.set_result(dict(context.invocation_metadata())["authorization"])
                return await super()._check_health(data, context)

        server, check = Keyed(), GrpcHealthCheck("k")
        assert (await check.check(server_at(await server.start())))[0] is Probe.HEALTHY
        assert await seen == "Bearer k"
        await check.close()
        await server.stop()

    run(scenario())
