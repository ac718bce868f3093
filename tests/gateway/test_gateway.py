"""Requests through a whole gateway while its servers fail, are added, removed and replaced."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from phalanx.errors import ConfigurationError
from phalanx.routing.snapshot import ServerState
from tests.gateway.http.running import HOST
from tests.gateway.policy_servers import actions, answer_to, failure, infer, request, run
from tests.gateway.whole import ProbedServer, ask, asked, channel, ready, running, until


def test_r97_four_servers_behind_one_address_work_at_once():
    """Two hosts with two servers each are four addresses in one pool."""

    async def scenario():
        servers = [ProbedServer() for _ in range(4)]
        for server in servers:
            server.behave = server.hold
        async with running(*servers) as gateway, channel(gateway) as client:
            await ready(gateway, 4)
            calls = [await infer(client, request(f"r-{index}")) for index in range(4)]
            await asyncio.gather(*(server.arrived() for server in servers))
            for server in servers:
                server.release.set()
            for index, call in enumerate(calls):
                assert await call == answer_to(request(f"r-{index}"))
            assert [len(server.requests) for server in servers] == [1, 1, 1, 1]
            assert {name for server in servers for name in server.asked} == {"pi05"}

    run(scenario())


def test_r101_a_server_that_says_it_is_not_healthy_gets_nothing_until_it_is():
    async def scenario():
        sick, well = ProbedServer(), ProbedServer()
        sick.healthy = False
        async with running(sick, well) as gateway, channel(gateway) as client:
            await ready(gateway, 1)
            for index in range(4):
                await (await infer(client, request(f"r-{index}")))
            assert (len(sick.requests), len(well.requests)) == (0, 4)
            sick.healthy = True
            await ready(gateway, 2)
            sick.healthy = False
            await sick.probed(3)
            await ready(gateway, 1)
            [view] = [s for s in gateway.pool.snapshot.servers if s.state is not ServerState.READY]
            assert view.detail == "CheckHealth says that it is not healthy"

    run(scenario())


def test_r110_a_server_that_is_gone_is_not_chosen_and_is_used_again_when_it_is_back():
    async def scenario():
        lost, kept = ProbedServer(), ProbedServer()
        async with running(lost, kept) as gateway, channel(gateway) as client:
            await ready(gateway, 2)
            port = lost.endpoint.port
            await lost.stop()
            for index in range(6):
                assert await (await infer(client, request(f"r-{index}")))
            assert len(kept.requests) + len(lost.requests) == 6
            await ready(gateway, 1)
            back = ProbedServer(port=port)
            await back.start()
            await ready(gateway, 2)
            for index in range(2):
                await (await infer(client, request(f"b-{index}")))
            assert len(back.requests) == 1
            await back.stop()

    run(scenario())


def test_r111_a_request_that_had_started_is_not_sent_again():
    async def scenario():
        servers = [ProbedServer(), ProbedServer()]
        for server in servers:
            server.behave = server.hold
        async with running(*servers) as gateway, channel(gateway) as client:
            await ready(gateway, 2)
            call = await infer(client, request())
            waits = [asyncio.create_task(server.arrived()) for server in servers]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            started, other = servers if servers[0].requests else reversed(servers)
            await started.stop()
            error = await failure(call)
            assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
            assert other.requests == []
            for wait in waits:
                wait.cancel()

    run(scenario())


def test_r102_servers_are_added_and_removed_while_requests_run():
    """The loop of requests never stops; none of them fails."""

    async def scenario():
        servers = [ProbedServer() for _ in range(3)]
        done = asyncio.Event()
        async with running(servers[0]) as gateway, channel(gateway) as client:
            await ready(gateway, 1)

            async def robot(name: str) -> int:
                count = 0
                while not done.is_set():
                    sent = request(f"{name}-{count}")
                    assert await (await infer(client, sent)) == answer_to(sent)
                    count += 1
                return count

            robots = [asyncio.create_task(robot(name)) for name in "abcd"]
            for _ in range(3):
                for server in servers[1:]:
                    where = await server.start() if not server.asked else server.endpoint
                    body = {"model_name": "pi05", "endpoint": str(where)}
                    added = await asked(gateway, "POST", "/v1/backends", body)
                    await until(gateway, ServerState.READY, added["server_id"])
                    seen = len(server.requests)
                    await server.arrived(seen + 3)
                for known in (await asked(gateway, "GET", "/v1/backends"))["backends"][1:]:
                    gone = f"/v1/backends/{known['server_id']}"
                    assert (await ask(gateway, "DELETE", gone)).status == 204
                    await until(gateway, None, known["server_id"])
            done.set()
            assert min(await asyncio.gather(*robots)) > 0
            total = sum(len(server.requests) for server in servers)
            first = (await asked(gateway, "GET", "/v1/pool"))["servers"][0]
            assert first["num_failed"] == 0
            assert total >= first["num_requests"]
            for server in servers[1:]:
                await server.stop()

    run(scenario())


def test_r102_a_removed_server_finishes_what_it_has_before_it_disappears():
    async def scenario():
        server = ProbedServer()
        server.behave = server.hold
        async with running(server) as gateway, channel(gateway) as client:
            await ready(gateway, 1)
            [server_id] = gateway.pool.snapshot.by_id
            call = await infer(client, request("r-1"))
            await server.arrived()
            assert (await ask(gateway, "DELETE", f"/v1/backends/{server_id}")).status == 204
            [shown] = (await asked(gateway, "GET", "/v1/backends"))["backends"]
            assert (shown["healthy"], shown["in_flight_requests"]) == (False, 1)
            error = await failure(await infer(client, request("r-2")))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert "1 draining" in error.details()
            server.release.set()
            assert await call == answer_to(request("r-1"))
            await until(gateway, None, server_id)
            assert (await ask(gateway, "DELETE", f"/v1/backends/{server_id}")).status == 404

    run(scenario())


def test_r100_the_gateway_does_not_look_at_what_a_model_takes():
    """Two servers under one name that answer differently: that they match is the operator's part."""

    async def scenario():
        one, other = ProbedServer(), ProbedServer()

        async def longer(data, context):
            return answer_to(data, actions(horizon=9))

        other.behave = longer
        async with running(one, other) as gateway, channel(gateway) as client:
            await ready(gateway, 2)
            answers = {len(await (await infer(client, request(f"r-{index}")))) for index in (1, 2)}
            assert len(answers) == 2

    run(scenario())


def test_r106_the_model_is_found_by_its_exact_name():
    async def scenario():
        async with running(ProbedServer()) as gateway, channel(gateway) as client:
            await ready(gateway, 1)
            error = await failure(await infer(client, request(model_name="PI05")))
            assert error.code() is grpc.StatusCode.NOT_FOUND
            assert "'PI05' is not served here; known: 'pi05'" in error.details()

    run(scenario())


def test_closing_lets_running_requests_end_and_takes_no_more():
    async def scenario():
        server = ProbedServer()
        server.behave = server.hold
        async with running(server) as gateway, channel(gateway) as client:
            await ready(gateway, 1)
            call = await infer(client, request("r-1"))
            await server.arrived()
            closing = asyncio.create_task(gateway.close(drain_s=20.0))
            with pytest.raises(OSError):
                while True:
                    await ask(gateway, "GET", "/ready")
            assert not closing.done()
            server.release.set()
            assert await call == answer_to(request("r-1"))
            await closing

    run(scenario())


def test_a_second_close_cuts_off_what_still_runs():
    async def scenario():
        server = ProbedServer()
        server.behave = server.hold
        async with running(server) as gateway, channel(gateway) as client:
            await ready(gateway, 1)
            call = await infer(client, request("r-1"))
            await server.arrived()
            closing = asyncio.create_task(gateway.close(drain_s=100.0))
            await asyncio.sleep(0)
            await gateway.close(drain_s=0.0)
            await closing
            assert (await failure(call)).code() is not grpc.StatusCode.OK
            await server.cancelled.wait()

    run(scenario())


@pytest.mark.parametrize("flag", ["--http-port", "gRPC"])
def test_an_address_in_use_is_named(flag):
    async def scenario():
        async with running() as first:
            grpc_port = 0 if flag == "--http-port" else first.grpc_port
            http_port = first.http_port if flag == "--http-port" else 0
            with pytest.raises(ConfigurationError, match=f"cannot listen on .*{flag}"):
                async with running(grpc_address=f"{HOST}:{grpc_port}", http_port=http_port):
                    pass

    run(scenario())


def test_what_fails_inside_is_told_to_who_waits():
    async def scenario():
        async with running() as gateway:
            waiting = asyncio.create_task(gateway.wait())
            gateway._run("part", _broken())
            with pytest.raises(RuntimeError, match="broken"):
                await waiting

    run(scenario())


async def _broken() -> None:
    raise RuntimeError("broken")


def test_stopping_ends_the_wait():
    async def scenario():
        async with running() as gateway:
            gateway.stop()
            await gateway.wait()

    run(scenario())


def test_r95_a_slow_server_beside_a_fast_one_gets_few_of_the_requests():
    """Of 200 requests, 8 in flight. The slow one answers once the fast one has answered 100 more."""

    async def scenario():
        slow, fast = ProbedServer(), ProbedServer()
        held: list[tuple[int, asyncio.Event]] = []
        num_answered = 0
        numbers = iter(range(200))

        def let_go(*, all_of_them: bool) -> None:
            for reached, event in held:
                if all_of_them or num_answered >= reached:
                    event.set()
            held[:] = [each for each in held if not each[1].is_set()]

        async def be_slow(data, context):
            event = asyncio.Event()
            held.append((num_answered + 100, event))
            let_go(all_of_them=len(held) == 8)  # or nobody would ask the fast one any more
            await event.wait()
            return answer_to(data)

        async def be_fast(data, context):
            nonlocal num_answered
            num_answered += 1
            let_go(all_of_them=False)
            return answer_to(data)

        slow.behave, fast.behave = be_slow, be_fast
        async with running(slow, fast) as gateway, channel(gateway) as client:
            await ready(gateway, 2)

            async def robot() -> None:
                for number in numbers:
                    await (await infer(client, request(f"r-{number}")))
                let_go(all_of_them=True)

            await asyncio.gather(*(robot() for _ in range(8)))
            assert len(slow.requests) + len(fast.requests) == 200
            assert len(slow.requests) <= 15

    run(scenario())
