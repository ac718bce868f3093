"""Modes `gateway` and `auto`, and one engine that is named itself."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from phalanx.client import AsyncRoleClient, RoleClientSettings
from phalanx.errors import (
    ConfigurationError,
    DeadlineExceededError,
    EngineUnavailableError,
    InvalidRequestError,
    NoServerError,
    RequestFailedError,
    RoleNotReadyError,
    UnknownModelError,
)
from phalanx.routing.roles.snapshot import ReplicaState
from phalanx.wire.discovery import refusal_body, refusal_status
from tests.client.roles.published import PAYLOAD, closed_port, role
from tests.client.roles.servers import FakeEngine, FakeGateway, FakeServer, Request, model

ASLEEP = ReplicaState.SLEEPING


@asynccontextmanager
async def engine_alone(behave=None):
    engine = FakeEngine() if behave is None else FakeEngine(behave=behave)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def inference(gateway: FakeGateway) -> list[Request]:
    return [request for request in gateway.requests if request.path != "/teacher/engines"]


def test_mode_gateway_sends_everything_there_and_follows_nothing():
    async def scenario():
        async with (
            role(FakeEngine()) as gateway,
            AsyncRoleClient(gateway.role_url, mode="gateway", api_key=None) as client,
        ):
            got = await client.generate(PAYLOAD, model="math", route_key="k", affinity="a")
            assert got["path"] == "/teacher/generate"
            assert got["sent"] == {**PAYLOAD, "model": "math", "route_key": "k"}
            assert got["headers"]["x-smg-routing-key"] == "a"
            got = await client.chat({"messages": [], "model": "math"})
            assert got["path"] == "/teacher/v1/chat/completions"
            assert got["sent"] == {"messages": [], "model": "math"}
            got = await client.generate({"messages": []})
            assert got["sent"] == {"messages": []}
            assert gateway.asked == []

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "error",
    [
        UnknownModelError("no such model", field="model"),
        UnknownModelError("no such key", field="route_key"),
        NoServerError("all tried"),
        RoleNotReadyError("asleep", role="teacher", model="m", state="sleeping", revision=4),
    ],
    ids=lambda error: f"{type(error).__name__}-{getattr(error, 'field', '')}",
)
def test_i41_the_gateways_refusals_are_raised_as_the_errors_they_are(error):
    async def scenario():
        async def refuse(request: Request) -> None:
            request.answer(refusal_body(error), refusal_status(error), retry_after="1")

        async with (
            role() as gateway,
            AsyncRoleClient(gateway.role_url, mode="gateway") as client,
        ):
            gateway.forward = refuse
            with pytest.raises(type(error), match=str(error)) as raised:
                await client.generate(PAYLOAD)
            assert vars(raised.value) == vars(error)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "too low", "param": "a.b"}},
        {
            "message": "too low",
            "type": "Bad Request",
            "code": 400,
            "param": "a.b",
            "object": "error",
        },
    ],
    ids=("as OpenAI", "as SGLang"),
)
def test_a_refusal_that_names_a_field_has_it(body):
    async def scenario():
        async def refuse(request: Request) -> None:
            request.answer(body, 400)

        async with (
            role() as gateway,
            AsyncRoleClient(gateway.role_url, mode="gateway") as client,
        ):
            gateway.forward = refuse
            with pytest.raises(InvalidRequestError, match="too low") as raised:
                await client.generate(PAYLOAD)
            assert raised.value.field == "a.b"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("status", "headers", "kind"),
    [
        (503, {"retry_after": "7"}, NoServerError),
        (503, {}, EngineUnavailableError),
        (504, {}, DeadlineExceededError),
        (400, {}, InvalidRequestError),
        (422, {}, InvalidRequestError),
        (405, {}, ConfigurationError),
        (409, {}, InvalidRequestError),
        (599, {}, RequestFailedError),
        (302, {}, RequestFailedError),
    ],
)
def test_any_other_answer_of_a_gateway_is_an_error_by_its_status(status, headers, kind):
    async def scenario():
        async def refuse(request: Request) -> None:
            request.answer(b"plain words", status, **headers)

        async with (
            role() as gateway,
            AsyncRoleClient(gateway.role_url, mode="gateway") as client,
        ):
            gateway.forward = refuse
            with pytest.raises(kind, match=f"{status}: plain words") as raised:
                await client.generate(PAYLOAD)
            if headers:
                assert raised.value.retry_after_s == 7

    asyncio.run(scenario())


def test_auto_is_direct_where_an_engine_can_be_had():
    async def scenario():
        engine = FakeEngine()
        async with (
            role(engine) as gateway,
            AsyncRoleClient(gateway.role_url, mode="auto") as client,
        ):
            await client.generate(PAYLOAD)
            assert len(engine.requests) == 1 and inference(gateway) == []

    asyncio.run(scenario())


def test_auto_goes_to_the_gateway_where_no_engine_can_be_had():
    async def scenario():
        engine = FakeEngine()
        async with (
            role(engine) as gateway,
            AsyncRoleClient(gateway.role_url, mode="auto") as client,
        ):
            gone = FakeEngine("math/1")
            await gone.start()
            replica = gone.replica()
            await gone.stop()
            for models, changes in (
                ((model("math", engine.replica()),), {"expose_engine_urls": False}),
                ((model("math", engine.replica(ASLEEP), state=ASLEEP),), {}),
                ((model("math", replica),), {"expose_engine_urls": True}),
            ):
                gateway.show(*models, **changes)
                await client.engines()
                got = await client.generate(PAYLOAD, model="math")
                assert got["path"] == "/teacher/generate"
                assert got["sent"] == {**PAYLOAD, "model": "math"}
            got = await client.generate({"messages": []})
            assert got["path"] == "/teacher/generate"
            assert engine.requests == []

    asyncio.run(scenario())


def test_auto_falls_back_only_before_a_byte_was_sent():
    async def scenario():
        async def lose(request: Request) -> None:
            request.cut()

        async with (
            role(FakeEngine(behave=lose)) as gateway,
            AsyncRoleClient(gateway.role_url, mode="auto") as client,
        ):
            with pytest.raises(EngineUnavailableError, match="may have run"):
                await client.generate(PAYLOAD)
            with pytest.raises(UnknownModelError):
                await client.generate(PAYLOAD, model="typo")
            assert inference(gateway) == []

    asyncio.run(scenario())


def test_auto_asks_the_gateway_also_where_discovery_cannot_be_had():
    async def scenario():
        async with role() as gateway:

            async def broken(request: Request) -> None:
                request.answer({"error": {"message": "not now"}}, 503)

            gateway.fault = broken
            async with AsyncRoleClient(gateway.role_url, mode="auto") as client:
                assert (await client.generate(PAYLOAD))["path"] == "/teacher/generate"
            async with AsyncRoleClient(gateway.role_url) as client:
                with pytest.raises(EngineUnavailableError, match="503: not now"):
                    await client.generate(PAYLOAD)

    asyncio.run(scenario())


def test_i23_health_is_what_the_gateway_says():
    async def scenario():
        async with (
            role(FakeEngine(), key="k") as gateway,
            AsyncRoleClient(gateway.role_url, api_key="k") as client,
        ):

            async def health(request: Request) -> None:
                request.answer({"status": "ok", "models": {"math": "ready"}, "at": request.path})

            gateway.forward = health
            assert (await client.health())["at"] == "/teacher/health"

    asyncio.run(scenario())


@pytest.mark.parametrize("suffix", ["", "/", "/generate", "/generate/"])
def test_i59_one_engine_can_be_named_by_its_own_url(suffix):
    async def scenario():
        async with engine_alone() as engine:
            for mode in ("direct", "auto", "gateway"):
                async with AsyncRoleClient(engine.url + suffix, mode=mode, api_key="k") as client:
                    got = await client.generate(PAYLOAD, model="math", route_key="gsm8k")
                    assert got["path"] == "/generate" and got["sent"] == PAYLOAD
                    assert got["headers"]["authorization"] == "Bearer k"
                    got = await client.chat({"messages": []}, model="math")
                    assert got["path"] == "/v1/chat/completions"
                    assert got["sent"] == {"messages": [], "model": "math"}

    asyncio.run(scenario())


def test_i59_a_teachers_gateway_url_that_ends_in_generate_means_the_role():
    async def scenario():
        engine = FakeEngine()
        async with role(engine) as gateway:
            async with AsyncRoleClient(f"{gateway.role_url}/generate") as client:
                await client.generate(PAYLOAD)
                assert len(engine.requests) == 1
                assert client.snapshot.role == "teacher"

    asyncio.run(scenario())


def test_i59_an_engine_has_health_and_no_discovery():
    async def scenario():
        async def health(request: Request) -> None:
            request.answer(b"")

        async with engine_alone(health) as engine, AsyncRoleClient(engine.url) as client:
            assert await client.health() == {}
            with pytest.raises(ConfigurationError, match="engines needs a role's discovery"):
                await client.engines()
            with pytest.raises(ConfigurationError, match="wait_ready needs a role's discovery"):
                await client.wait_ready()
            assert client.snapshot is None

    asyncio.run(scenario())


def test_an_engine_that_is_not_there_has_been_sent_nothing():
    async def scenario():
        async with AsyncRoleClient(f"{closed_port()}/generate") as client:
            with pytest.raises(NoServerError, match="nothing was sent"):
                await client.generate(PAYLOAD)
        stuck = FakeServer(lambda request: asyncio.sleep(0))
        await stuck.start()
        await stuck.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("127.0.0.1:30000/teacher", "no HTTP URL"),
        ("grpc://h:1/teacher", "no HTTP URL"),
        ("http:///teacher", "no valid host"),
        ("http://h:0/teacher", "no valid host and port"),
        ("http://h:x/teacher", "cannot be read"),
        ("http://\u00fc:1/teacher", "no valid host and port"),
        ("http://user:secret@h:1/teacher", "credentials"),
        ("http://h:1/teacher?a=1", "query"),
        ("http://h:1/teacher/v1", "takes 'http://h:1/teacher' here"),
        ("http://h:1/teacher/v1/chat/completions/", "takes 'http://h:1/teacher' here"),
        ("http://h:1/v1/", "takes 'http://h:1' here"),
    ],
)
def test_an_address_that_is_none_is_refused_and_says_what_is_wanted(url, why):
    async def scenario():
        with pytest.raises(ConfigurationError, match=why) as raised:
            AsyncRoleClient(url)
        assert "http://GATEWAY:PORT/ROLE" in str(raised.value)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"mode": "both"}, "mode='both' must be one of direct, gateway, auto"),
        ({"api_key": ""}, "api_key must be printable"),
        ({"api_key": "a\nb"}, "api_key must be printable"),
    ],
)
def test_wrong_arguments_are_refused(arguments, why):
    async def scenario():
        with pytest.raises(ConfigurationError, match=why):
            AsyncRoleClient("http://h:1/teacher", **arguments)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "settings",
    [{"timeout_s": 0.0}, {"poll_s": float("inf")}, {"connect_timeout_s": -1.0}],
)
def test_wrong_settings_are_refused(settings):
    with pytest.raises(ConfigurationError, match="finite number above 0"):
        RoleClientSettings(**settings)


def test_a_certificate_that_cannot_be_read_and_a_time_that_is_none_are_refused(tmp_path):
    async def scenario():
        settings = RoleClientSettings(tls_root=tmp_path / "no.pem")
        with pytest.raises(ConfigurationError, match=r"no\.pem.*cannot be used"):
            AsyncRoleClient("https://h:1/teacher", settings=settings)
        async with AsyncRoleClient("http://h:1/teacher") as client:
            with pytest.raises(ConfigurationError, match=r"timeout_s=0 must be"):
                await client.generate(PAYLOAD, timeout_s=0)
            with pytest.raises(ConfigurationError, match=r"timeout_s=-1 must be"):
                client.stream_generate(PAYLOAD, timeout_s=-1)

    asyncio.run(scenario())
