"""Clients of a policy against real gRPC servers: what arrives, and how each failure is told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import numpy as np
import pytest

from phalanx.client import AsyncPolicyClient, PolicySettings
from phalanx.errors import (
    BodyTooLargeError,
    ConfigurationError,
    DeadlineExceededError,
    EngineOverloadedError,
    EngineUnavailableError,
    InvalidRequestError,
    NoServerError,
    RequestFailedError,
    UnknownModelError,
)
from phalanx.gateway.http.keys import Keys
from phalanx.schema.observation import Observation
from phalanx.testing import ManualClock
from phalanx.wire import robot_inference as wire
from tests.gateway.policy_servers import (
    FakePolicyServer,
    actions,
    answer_to,
    fleet,
    refusing,
    request,
    run,
)

Code = grpc.StatusCode
IMAGE = np.full((16, 24, 3), 90, np.uint8)


def client_of(server: FakePolicyServer, **settings: object) -> AsyncPolicyClient:
    return AsyncPolicyClient(
        str(server.endpoint),
        model="pi05",
        settings=PolicySettings(**settings),  # type: ignore[arg-type]
    )


def test_act_sends_what_the_robot_has_and_gives_the_actions():
    async def scenario():
        server = FakePolicyServer()
        await server.start()
        async with AsyncPolicyClient(
            f"grpc://{server.endpoint}", model="pi05", clock=ManualClock(5.0)
        ) as client:
            got = await client.act(
                images={"base": IMAGE},
                state=[0.1, 0.2],
                instruction="pick",
                horizon=3,
                parameters={"num_steps": 4},
            )
            np.testing.assert_array_equal(got, actions())
            got += 1  # it is the caller's own
            call = wire.decode_request(server.requests[0])
            assert (call.model_name, call.timestamp_ns) == ("pi05", 5_000_000_000)
            sent = call.observation
            np.testing.assert_array_equal(sent.images["base"], IMAGE)
            assert sent.state.dtype == np.float32
            assert (sent.instructions, sent.batched, sent.horizon) == (("pick",), False, 3)
            assert sent.parameters == {"num_steps": 4}
            answer = await client.call(Observation())
            assert answer.inference_time_us == 1500
            ids = {wire.peek(data).request_id for data in server.requests}
            assert len(ids) == 2
        await server.stop()

    run(scenario())


@pytest.mark.parametrize(
    ("fields", "rows"),
    [
        ({"instruction": ["a", "b"]}, 2),
        ({"state": np.zeros((2, 3))}, 2),
        ({"images": {"base": np.stack([IMAGE, IMAGE])}, "instruction": "all"}, 2),
        ({"instruction": ["a"]}, 1),
    ],
)
def test_a_batch_is_known_by_its_arrays(fields, rows):
    async def scenario():
        server = FakePolicyServer()
        await server.start()
        async with client_of(server) as client:
            assert (await client.act(**fields)).shape == (rows, 3, 2)
            sent = wire.decode_request(server.requests[0]).observation
            assert sent.batched and sent.num_rows == rows
        await server.stop()

    run(scenario())


def test_jpeg_is_smaller_and_close():
    async def scenario():
        server = FakePolicyServer()
        await server.start()
        image = np.full((240, 320, 3), 90, np.uint8)
        async with client_of(server) as raw, client_of(server, jpeg_quality=90) as jpeg:
            for client in (raw, jpeg):
                await client.act(images={"base": image})
            assert len(server.requests[1]) < len(server.requests[0]) / 20
            got = wire.decode_request(server.requests[1]).observation.images["base"]
            assert np.abs(got.astype(int) - image).max() <= 2
        await server.stop()

    run(scenario())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"state": ["a"]}, "the state is not numbers"),
        ({"state": [float("inf")]}, "the state is not finite at index 0"),
        ({"state": [[1.0], [2.0]], "instruction": ["a"]}, "2 rows beside 1 instructions"),
        ({"images": {"base": [1, 2]}}, "image 'base' is list; give a numpy array"),
        ({"images": {"base": IMAGE / 255}}, "image 'base' is float64; send uint8"),
        ({"images": {"base": IMAGE[0]}}, r"image 'base' has shape \(24, 3\)"),
        ({"horizon": 0}, "requested_action_horizon=0 must be at least 1"),
        ({"horizon": 1 << 40}, "must be at most"),
        ({"parameters": {"x": object()}}, "cannot be sent as JSON"),
        ({"instruction": []}, "0 instructions for a batch"),
    ],
)
def test_what_cannot_be_sent_is_refused_before_it_is(fields, words):
    async def scenario():
        server = FakePolicyServer()
        await server.start()
        async with client_of(server) as client:
            with pytest.raises(InvalidRequestError, match=words):
                await client.act(**fields)
        assert server.requests == []
        await server.stop()

    run(scenario())


@pytest.mark.parametrize(
    ("behave", "kind", "words"),
    [
        (
            refusing(Code.INVALID_ARGUMENT, "camera 'top' is not one of base"),
            InvalidRequestError,
            "camera 'top' is not one of base",
        ),
        (refusing(Code.NOT_FOUND, "no such model"), UnknownModelError, "no such model"),
        (refusing(Code.UNAVAILABLE, "stopping"), EngineUnavailableError, "stopping"),
        (
            refusing(Code.UNAVAILABLE, "none", [(wire.NOT_STARTED, "1"), ("retry-after", "7")]),
            NoServerError,
            "none",
        ),
        (
            refusing(Code.RESOURCE_EXHAUSTED, "full", [(wire.NOT_STARTED, "1")]),
            EngineOverloadedError,
            "full",
        ),
        (
            refusing(Code.RESOURCE_EXHAUSTED, "out of memory"),
            RequestFailedError,
            r"out of memory \(RESOURCE_EXHAUSTED\)",
        ),
        (refusing(Code.UNAUTHENTICATED, "no"), ConfigurationError, "give the key as api_key"),
        (refusing(Code.UNIMPLEMENTED, "no"), ConfigurationError, "does not speak robot"),
        (refusing(Code.INTERNAL, "it broke"), RequestFailedError, r"it broke \(INTERNAL\)"),
        (refusing(Code.CANCELLED, "ended"), RequestFailedError, r"ended \(CANCELLED\)"),
        (refusing(Code.DATA_LOSS, ""), RequestFailedError, "DATA_LOSS"),
    ],
)
def test_each_status_has_its_class(behave, kind, words):
    async def scenario():
        server = FakePolicyServer(behave)
        await server.start()
        async with client_of(server) as client:
            with pytest.raises(kind, match=words) as raised:
                await client.act()
            assert type(raised.value) is kind
            assert str(server.endpoint) in str(raised.value)
            if kind is NoServerError:
                assert raised.value.retry_after_s == 7
        assert len(server.requests) == 1, "nothing is sent again"
        await server.stop()

    run(scenario())


async def another_id(data, context):
    return answer_to(request("another"))


async def garbage(data, context):
    return b"\xff"


@pytest.mark.parametrize(
    ("behave", "words"),
    [(another_id, "answered request 'another' instead of"), (garbage, "cannot be read")],
)
def test_an_answer_that_is_none_is_a_failure(behave, words):
    async def scenario():
        server = FakePolicyServer(behave)
        await server.start()
        async with client_of(server) as client:
            with pytest.raises(RequestFailedError, match=words):
                await client.act()
        await server.stop()

    run(scenario())


def test_a_deadline_ends_the_request_here_and_there():
    async def scenario():
        server = FakePolicyServer()
        server.behave = server.hold
        await server.start()
        async with client_of(server, timeout_s=30.0) as client:
            with pytest.raises(DeadlineExceededError) as raised:
                await client.act(timeout_s=0.1)
            assert isinstance(raised.value, TimeoutError)
            await server.cancelled.wait()
            running = asyncio.ensure_future(client.act())
            await server.arrived(2)
            assert 25 < server.remaining_s[1] < 35
            server.cancelled.clear()
            running.cancel()
            await server.cancelled.wait()
            with pytest.raises(asyncio.CancelledError):
                await running
        await server.stop()

    run(scenario())


def test_the_address_of_an_http_server_is_told():
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def scenario():
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with AsyncPolicyClient(f"127.0.0.1:{port}", model="pi05") as client:
                with pytest.raises(ConfigurationError, match="an HTTP server listens there"):
                    await client.act(images={"base": IMAGE}, instruction="pick")

    run(scenario())


def test_an_address_where_nobody_listens_is_told_and_found_when_somebody_does():
    async def scenario():
        server = FakePolicyServer()
        endpoint = await server.start()
        await server.stop()
        async with AsyncPolicyClient(str(endpoint)) as client:
            with pytest.raises(EngineUnavailableError, match=str(endpoint)):
                await client.act()
            again = FakePolicyServer(port=endpoint.port)
            await again.start()
            await client._channel.channel_ready()
            await client.act()
            await again.stop()

    run(scenario())


def test_a_larger_observation_than_allowed_is_not_sent():
    async def scenario():
        server = FakePolicyServer()
        await server.start()
        async with client_of(server, max_message_bytes=1000) as client:
            with pytest.raises(BodyTooLargeError, match=r"at most max_message_bytes=1000"):
                await client.act(images={"base": IMAGE})
        assert server.requests == []
        await server.stop()

    run(scenario())


def test_through_a_gateway_with_a_key():
    async def scenario():
        async with fleet(FakePolicyServer(), keys=Keys("secret")) as gateway:
            async with AsyncPolicyClient(gateway.address) as client:
                with pytest.raises(ConfigurationError, match="give the key as api_key"):
                    await client.act()
            settings = PolicySettings(api_key="secret")
            async with AsyncPolicyClient(gateway.address, settings=settings) as client:
                np.testing.assert_array_equal(await client.act(), actions())
                assert await client.healthy()
            async with AsyncPolicyClient(gateway.address, model="act", settings=settings) as client:
                assert not await client.healthy()
                with pytest.raises(UnknownModelError, match="model 'act' is not served here"):
                    await client.act()

    run(scenario())


def test_a_closed_client_says_so():
    async def scenario():
        client = AsyncPolicyClient("127.0.0.1:1")
        await client.close()
        await client.close()
        with pytest.raises(EngineUnavailableError, match="the client is closed"):
            await client.act()

    run(scenario())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AsyncPolicyClient("http://h:1"), "is an HTTP address; give the gRPC"),
        (lambda: AsyncPolicyClient("nowhere"), "has no port"),
        (lambda: PolicySettings(timeout_s=0), "timeout_s=0 must be a finite number above 0"),
        (lambda: PolicySettings(timeout_s=float("nan")), "must be a finite number"),
        (lambda: PolicySettings(jpeg_quality=100), "jpeg_quality=100 must be from 1 to 95"),
        (lambda: PolicySettings(api_key="a\n"), "printable ASCII"),
        (lambda: PolicySettings(tls_root="x"), "needs tls=True"),
        (lambda: PolicySettings(max_message_bytes=0), "must be at least 1"),
        (
            lambda: AsyncPolicyClient(
                "h:1", settings=PolicySettings(tls=True, tls_root=Path("/no"))
            ),
            "tls_root='/no' cannot be read",
        ),
    ],
)
def test_wrong_settings_are_told(make, words):
    async def scenario():
        with pytest.raises(ConfigurationError, match=words):
            make()

    run(scenario())
