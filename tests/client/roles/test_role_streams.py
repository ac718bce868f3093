"""Streams: each event as soon as it is there, to its end, its deadline, or its reader's leaving."""

from __future__ import annotations

import asyncio
import json

import pytest

from phalanx.client import AsyncRoleClient
from phalanx.client.roles.event_lines import EventLines
from phalanx.errors import (
    DeadlineExceededError,
    EngineUnavailableError,
    InvalidRequestError,
    NoServerError,
    RequestFailedError,
    RoleNotReadyError,
)
from phalanx.routing.roles.snapshot import ReplicaState
from tests.client.roles.published import PAYLOAD, role
from tests.client.roles.servers import FakeEngine, Request, model
from tests.client.roles.shifted_loop import advance, run_shifted

EVENTS = [{"text": "a"}, {"text": "a\u2028b"}, {"text": "", "meta_info": {"finish_reason": None}}]


def test_i28_events_come_one_by_one_as_they_are_sent():
    async def scenario():
        async def step_by_step(request: Request) -> None:
            request.begin_stream()
            for event in EVENTS:
                await go.acquire()
                request.event(event)
            request.end_stream()

        go = asyncio.Semaphore(0)
        engine = FakeEngine(behave=step_by_step)
        async with role(engine) as gateway, AsyncRoleClient(gateway.role_url) as client:
            got = []
            go.release()
            async for event in client.stream_generate(PAYLOAD, model="math"):
                got.append(event)
                go.release()  # the next one is sent only now
            assert got == EVENTS
            assert engine.requests[0].json == {**PAYLOAD, "stream": True}
            assert client._calls._balancer.load.total == 0

    asyncio.run(scenario())


def test_a_chat_streams_from_engine_and_gateway():
    async def scenario():
        async def both(request: Request) -> None:
            request.begin_stream()
            request.event({"path": request.path, "sent": request.json})
            request.end_stream()

        async with role(FakeEngine(behave=both)) as gateway:
            gateway.forward = both
            for mode, path in (("direct", ""), ("gateway", "/teacher")):
                async with AsyncRoleClient(gateway.role_url, mode=mode) as client:
                    chat = {"messages": [], "stream": True}
                    (event,) = [event async for event in client.stream_chat(chat, model="math")]
                    assert event["path"] == f"{path}/v1/chat/completions"
                    assert event["sent"] == {**chat, "model": "math"}

    asyncio.run(scenario())


@pytest.mark.parametrize("by_leaving", [True, False])
def test_leaving_a_stream_closes_it_at_the_engine_and_its_count(by_leaving):
    async def scenario():
        async def endless(request: Request) -> None:
            request.begin_stream()
            request.event({"n": 1})
            await request.gone.wait()
            left.set()

        left = asyncio.Event()
        async with role(FakeEngine(behave=endless)) as gateway:
            async with AsyncRoleClient(gateway.role_url) as client:
                stream = client.stream_generate(PAYLOAD)
                if by_leaving:
                    async with stream:
                        assert await anext(stream) == {"n": 1}
                        assert client._calls._balancer.load.total == 1
                else:
                    await anext(stream)
                    waiting = asyncio.create_task(anext(stream))
                    await asyncio.sleep(0)
                    waiting.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await waiting
                await left.wait()
                assert client._calls._balancer.load.total == 0
                with pytest.raises(StopAsyncIteration):
                    await anext(stream)

    asyncio.run(scenario())


def test_a_deadline_is_for_the_whole_stream():
    async def scenario():
        async def slow(request: Request) -> None:
            request.begin_stream()
            request.event({"n": 1})
            await request.gone.wait()
            left.set()

        left = asyncio.Event()
        async with role(FakeEngine(behave=slow)) as gateway:
            async with AsyncRoleClient(gateway.role_url) as client:
                stream = client.stream_generate(PAYLOAD, timeout_s=50)
                assert await anext(stream) == {"n": 1}
                advance(51)
                with pytest.raises(DeadlineExceededError, match="/teacher/generate"):
                    await anext(stream)
                await left.wait()

    run_shifted(scenario())


@pytest.mark.parametrize(
    ("event", "kind", "why"),
    [
        ({"error": {"message": "too long", "code": 400}}, InvalidRequestError, "too long"),
        ({"error": {"message": "broke", "code": 500}}, RequestFailedError, "broke"),
        ({"error": {"message": "broke", "code": "internal"}}, RequestFailedError, "broke"),
        ({"error": "words"}, RequestFailedError, "words"),
        ({"error": {"message": 3}}, RequestFailedError, "message"),
        ([1], RequestFailedError, "cannot be read"),
    ],
)
def test_a_failure_inside_a_stream_is_raised(event, kind, why):
    async def scenario():
        async def fail(request: Request) -> None:
            request.begin_stream()
            request.event({"n": 1})
            request.event(event)
            request.end_stream()

        async with role(FakeEngine(behave=fail)) as gateway:
            async with AsyncRoleClient(gateway.role_url) as client:
                stream = client.stream_generate(PAYLOAD)
                assert await anext(stream) == {"n": 1}
                with pytest.raises(kind, match=why):
                    await anext(stream)
                assert client._calls._balancer.load.total == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["cut", "ended"])
def test_i43_a_stream_that_breaks_off_is_not_begun_again(how):
    async def scenario():
        async def break_off(request: Request) -> None:
            request.begin_stream()
            request.event({"n": 1})
            await request.writer.drain()
            if how == "cut":
                await more.wait()
                request.cut()
            else:
                request.writer.write(b"0\r\n\r\n")  # whole, but without its last event

        more = asyncio.Event()
        engines = FakeEngine("math/0", break_off), FakeEngine("math/1", break_off)
        async with role(*engines) as gateway, AsyncRoleClient(gateway.role_url) as client:
            stream = client.stream_generate(PAYLOAD)
            assert await anext(stream) == {"n": 1}
            more.set()
            with pytest.raises(EngineUnavailableError, match="not sent again"):
                await anext(stream)
            assert sum(len(engine.requests) for engine in engines) == 1

    asyncio.run(scenario())


def test_d4_a_stream_that_finds_no_connection_goes_to_another_replica():
    async def scenario():
        async def one(request: Request) -> None:
            request.begin_stream()
            request.event({"n": 1})
            request.end_stream()

        gone, there = FakeEngine("math/0"), FakeEngine("math/1", one)
        async with role(there) as gateway, AsyncRoleClient(gateway.role_url) as client:
            await gone.start()
            gateway.show(model("math", gone.replica(), there.replica()))
            await gone.stop()
            for _ in range(3):
                assert [event async for event in client.stream_generate(PAYLOAD)] == [{"n": 1}]
            gateway.show(model("math", state=ReplicaState.DRAINING))
            await client.engines()
            with pytest.raises(RoleNotReadyError):
                await anext(client.stream_generate(PAYLOAD))

    asyncio.run(scenario())


def test_a_refusal_before_the_first_event_has_its_status():
    async def scenario():
        async def refuse(request: Request) -> None:
            request.answer({"error": {"message": "too long"}}, 400)

        async with role(FakeEngine(behave=refuse)) as gateway:
            async with AsyncRoleClient(gateway.role_url) as client:
                with pytest.raises(InvalidRequestError, match="400: too long"):
                    await anext(client.stream_generate(PAYLOAD))
                with pytest.raises(InvalidRequestError, match="stream is false"):
                    client.stream_generate({**PAYLOAD, "stream": False})

    asyncio.run(scenario())


def test_closing_the_client_ends_its_streams():
    async def scenario():
        async def endless(request: Request) -> None:
            request.begin_stream()
            request.event({"n": 1})
            await request.gone.wait()
            left.release()

        left = asyncio.Semaphore(0)
        async with role(FakeEngine(behave=endless)) as gateway:
            client = AsyncRoleClient(gateway.role_url)
            waited_for, idle = client.stream_generate(PAYLOAD), client.stream_generate(PAYLOAD)
            unread = client.stream_generate(PAYLOAD)
            await anext(waited_for)
            await anext(idle)
            waiting = asyncio.create_task(anext(waited_for))
            await asyncio.sleep(0)
            await client.close()
            for reading in (waiting, anext(idle), anext(unread)):
                with pytest.raises(EngineUnavailableError, match="the client is closed"):
                    await reading
            await left.acquire()
            await left.acquire()
            await idle.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_are_the_same_however_the_bytes_are_cut(size):
    text = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in EVENTS)
    raw = b": a comment\nevent: x\r\n" + text + b"data:[DONE]\r\n\r\ndata: unfinished"
    lines = EventLines()
    got = [one for at in range(0, len(raw), size) for one in lines.feed(raw[at : at + size])]
    assert [json.loads(one) for one in got[:-1]] == EVENTS and got[-1] == b"[DONE]"


def test_not_connected_is_a_server_that_is_not_ready():
    from phalanx.client.roles.http_exchange import NotConnectedError

    assert issubclass(NotConnectedError, NoServerError)
