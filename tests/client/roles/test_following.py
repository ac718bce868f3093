"""A client follows its role by long poll: each change, each epoch, and through outages."""

from __future__ import annotations

import asyncio
import gzip

import pytest

from phalanx.client import AsyncRoleClient, RoleClientSettings
from phalanx.client.roles.settings import Mode
from phalanx.errors import (
    DeadlineExceededError,
    EngineUnavailableError,
    RequestFailedError,
    UnknownModelError,
)
from phalanx.routing.roles.snapshot import ReplicaState
from tests.client.roles.published import PAYLOAD, closed_port, heard, role
from tests.client.roles.servers import FakeEngine, FakeGateway, Request, content, model


def client_of(url: str, mode: Mode = "direct") -> AsyncRoleClient:
    """One that soon asks again a gateway that it has lost."""
    return AsyncRoleClient(url, mode=mode, settings=RoleClientSettings(retry_s=0.01))


def test_every_change_is_heard_and_used_without_being_asked_for():
    async def scenario():
        first, second = FakeEngine("math/0"), FakeEngine("math/1")
        async with role(first, second) as gateway, client_of(gateway.role_url) as client:
            gateway.show(model("math", first.replica()))
            await client.generate(PAYLOAD)
            for replicas, used in (
                ((second.replica(),), second),
                ((first.replica(), second.replica(ReplicaState.DRAINING)), first),
                ((second.replica(generation=1),), second),
            ):
                gateway.show(model("math", *replicas))
                await heard(client, gateway)
                before = len(used.requests)
                await client.generate(PAYLOAD)
                assert len(used.requests) == before + 1
            polls = [query for query in gateway.asked if "after" in query]
            assert [query["after"] for query in polls[:4]] == ["2", "3", "4", "5"]
            assert all(query["epoch"] == "e1" for query in polls)
            assert all(15 <= float(query["wait_s"]) <= 20 for query in polls)
            # One follower, whatever the number of requests; the first look is not a poll.
            assert len(gateway.asked) - len(polls) == 1

    asyncio.run(scenario())


def test_many_requests_at_once_look_together():
    async def scenario():
        async with role(FakeEngine()) as gateway, client_of(gateway.role_url) as client:
            await asyncio.gather(*(client.generate(PAYLOAD) for _ in range(20)))
            assert len([query for query in gateway.asked if "after" not in query]) == 1

    asyncio.run(scenario())


def test_d5_a_registry_that_has_started_anew_is_followed_though_its_revisions_are_lower():
    async def scenario():
        old, new = FakeEngine("math/0"), FakeEngine("math/0")
        async with role(old, new) as gateway, client_of(gateway.role_url) as client:
            for _ in range(5):
                gateway.show(model("math", old.replica()))
                gateway.show(model("math"))
            gateway.show(model("math", old.replica()))
            await client.generate(PAYLOAD)
            gateway.start_anew("e2", content(model("math", new.replica())))
            await heard(client, gateway)
            assert (client.snapshot.epoch, client.snapshot.revision) == ("e2", 0)
            await client.generate(PAYLOAD)
            assert (len(old.requests), len(new.requests)) == (1, 1)

    asyncio.run(scenario())


def test_an_answer_that_was_overtaken_does_not_bring_an_old_epoch_or_revision_back():
    async def scenario():
        async with role(FakeEngine()) as gateway, client_of(gateway.role_url) as client:
            await client.wait_ready()
            await gateway.arrived(2)
            held: list[Request] = []
            bodies: list[bytes] = []

            async def hold_first(request: Request) -> None:
                if not held and "after" not in request.query:
                    held.append(request)
                    bodies.append(gateway.documents.of(gateway.registry.snapshot).discovery)
                    arrived.set()
                    await release.wait()
                    request.answer(bodies[0])
                else:
                    await gateway._discovery(request)

            arrived, release = asyncio.Event(), asyncio.Event()
            gateway.fault = hold_first
            late = asyncio.create_task(client.engines())
            await arrived.wait()
            gateway.start_anew("e2", content(model("math"), phase="new"))
            await heard(client, gateway)
            gateway.show(model("math", state=ReplicaState.STARTING))
            await heard(client, gateway)
            release.set()
            assert (await late).registry_epoch == "e1"  # what was answered then
            assert (client.snapshot.epoch, client.snapshot.revision) == ("e2", 1)

    asyncio.run(scenario())


def test_the_last_snapshot_serves_while_the_gateway_is_away_and_it_is_followed_again():
    async def scenario():
        first, second = FakeEngine("math/0"), FakeEngine("math/1")
        async with role(first, second) as gateway, client_of(gateway.role_url) as client:
            gateway.show(model("math", first.replica()))
            await client.generate(PAYLOAD)
            port = gateway.port
            await gateway.stop()
            for _ in range(3):
                await client.generate(PAYLOAD)
            assert len(first.requests) == 4
            gateway.start_anew("e2", content(model("math", second.replica())))
            await gateway.start(port)
            await heard(client, gateway)
            await client.generate(PAYLOAD)
            assert len(second.requests) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("answer", [b"no", b"{}", b'{"role": "r", "models": {"m": {"state": 1}}}'])
def test_an_answer_that_is_no_document_changes_nothing(answer):
    async def scenario():
        async def nonsense(request: Request) -> None:
            request.answer(answer)
            asked.set()

        asked = asyncio.Event()
        engine = FakeEngine()
        async with role(engine) as gateway, client_of(gateway.role_url) as client:
            await client.wait_ready()
            await gateway.arrived(2)
            gateway.fault = nonsense
            gateway.show(model("math"))  # ends the poll that is on its way
            await heard(client, gateway)
            await asked.wait()
            gateway.fault = None
            gateway.show(model("math", engine.replica()))
            await heard(client, gateway)
            await client.generate(PAYLOAD)

    asyncio.run(scenario())


def test_a_server_that_answers_at_once_is_not_asked_without_pause():
    async def scenario():
        async def at_once(request: Request) -> None:
            request.answer(gateway.documents.of(gateway.registry.snapshot).discovery)
            times.append(asyncio.get_running_loop().time())
            if len(times) == 4:
                enough.set()

        times: list[float] = []
        enough = asyncio.Event()
        async with role(FakeEngine()) as gateway, client_of(gateway.role_url) as client:
            gateway.fault = at_once
            await client.wait_ready()
            await enough.wait()
        pauses = [after - before for before, after in zip(times[1:], times[2:], strict=False)]
        assert min(pauses) > 0.01 / 2

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "body", [b"plain", gzip.compress(b"{}" * 50)[:-9]], ids=("other", "cut off")
)
def test_what_cannot_be_unpacked_is_told_so(body):
    async def scenario():
        async def packed(request: Request) -> None:
            request.answer(body, content_encoding="gzip")

        async with role() as gateway, client_of(gateway.role_url) as client:
            gateway.fault = packed
            with pytest.raises(RequestFailedError, match="cannot be unpacked|cut off"):
                await client.engines()
            with pytest.raises(EngineUnavailableError, match="discovery cannot be had"):
                await client.generate(PAYLOAD)

    asyncio.run(scenario())


def test_waiting_for_a_model_ends_when_it_is_ready_and_not_before():
    async def scenario():
        engine = FakeEngine()
        async with role(engine) as gateway, client_of(gateway.role_url) as client:
            gateway.show(model("math", state=ReplicaState.STARTING))
            waiting = asyncio.create_task(client.wait_ready("math"))
            for state in (ReplicaState.STARTING, ReplicaState.READY):
                await gateway.arrived(len(gateway.requests) + 1)
                assert not waiting.done()
                gateway.show(model("math", engine.replica(state), state=state))
            assert (await waiting).revision == gateway.registry.snapshot.revision
            with pytest.raises(UnknownModelError):
                await client.wait_ready("typo")
            gateway.show(model("math", state=ReplicaState.SLEEPING))
            await heard(client, gateway)
            with pytest.raises(DeadlineExceededError, match="0.02 s: .*'math'.*has no replicas"):
                await client.wait_ready("math", timeout_s=0.02)

    asyncio.run(scenario())


def test_by_the_gateway_a_model_is_ready_though_its_engines_are_not_shown():
    async def scenario():
        engine = FakeEngine()
        async with role(engine) as gateway:
            gateway.show(model("math", engine.replica()), expose_engine_urls=False)
            async with client_of(gateway.role_url, "gateway") as client:
                await client.wait_ready("math")
            async with client_of(gateway.role_url) as client:
                await client.engines()
                with pytest.raises(DeadlineExceededError, match="'math'.*expose_engine_urls|shown"):
                    await client.wait_ready("math", timeout_s=0.02)

    asyncio.run(scenario())


def test_a_gateway_that_comes_later_is_waited_for(caplog):
    async def scenario():
        gateway, engine = FakeGateway(), FakeEngine()
        url = closed_port()
        await engine.start()
        gateway.show(model("math", engine.replica()))
        async with client_of(f"{url}/teacher") as client:
            waiting = asyncio.create_task(client.wait_ready())
            with pytest.raises(EngineUnavailableError):
                await client.generate(PAYLOAD)
            assert not waiting.done()
            await gateway.start(int(url.rpartition(":")[2]))
            assert (await waiting).content.by_name["math"].eligible
        await gateway.stop()
        await engine.stop()

    asyncio.run(scenario())
    assert "nothing is known of it yet" in caplog.text


def test_a_large_document_comes_compressed():
    async def scenario():
        async with role(FakeEngine()) as gateway:
            engine = FakeEngine()
            await engine.start()
            many = [engine.replica(generation=number) for number in range(200)]
            gateway.show(model("math", *many))
            async with client_of(gateway.role_url) as client:
                assert len((await client.engines()).models["math"].engines) == 200
            await engine.stop()

    asyncio.run(scenario())


def test_a_look_that_began_earlier_is_not_the_one_that_is_asked_for_now():
    async def scenario():
        held: list[Request] = []

        async def hold_first(request: Request) -> None:
            if "after" not in request.query:
                held.append(request)
                arrived.release()
                if len(held) == 1:
                    await release.wait()
            await gateway._discovery(request)

        arrived, release = asyncio.Semaphore(0), asyncio.Event()
        async with role(FakeEngine()) as gateway, client_of(gateway.role_url) as client:
            await client.wait_ready()
            gateway.fault = hold_first
            refresh = client._calls.follower.refresh
            early = asyncio.create_task(refresh())
            await arrived.acquire()
            late = [asyncio.create_task(refresh()) for _ in range(3)]
            await asyncio.sleep(0)
            release.set()
            await asyncio.gather(early, *late)
            assert len(held) == 2  # all who came late share one

    asyncio.run(scenario())


def test_closing_stops_following():
    async def scenario():
        async with role(FakeEngine()) as gateway:
            client = client_of(gateway.role_url)
            await client.wait_ready()
            poll = await gateway.arrived(2)
            await client.close()
            await poll.gone.wait()

    asyncio.run(scenario())
