"""The gateway's gRPC port: who is let in, what is too large, registration, health, an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess

import grpc
import numpy as np
import pytest

from phalanx.errors import ConfigurationError, InvalidRequestError
from phalanx.gateway.grpc.front import GrpcFront, GrpcLimits, Tls
from phalanx.gateway.grpc.service import Service
from phalanx.gateway.http.keys import Keys
from phalanx.gateway.http.router import Access
from phalanx.routing.registration import Probe
from phalanx.testing import ManualClock
from phalanx.wire import robot_inference as wire
from tests.gateway.policy_servers import (
    HOST,
    FakePolicyServer,
    answer_to,
    failure,
    fleet,
    infer,
    request,
    run,
)

Code = grpc.StatusCode


def register(channel, endpoint, model="pi05", key=None):
    data = wire.encode_registration(wire.Registration(endpoint, model))
    metadata = None if key is None else (("authorization", f"Bearer {key}"),)
    return channel.unary_unary(wire.REGISTER)(data, metadata=metadata)


async def health(channel, model):
    answer = await channel.unary_unary(wire.CHECK_HEALTH)(wire.encode_health_request(model))
    return wire.decode_health_response(answer)


def test_a_server_that_registers_itself_gets_requests_until_it_stops_saying_so():
    async def scenario():
        server = FakePolicyServer()
        endpoint = await server.start()
        async with fleet() as gateway, gateway.client() as client:
            answer = wire.decode_registration_answer(await register(client, str(endpoint)))
            assert answer.accepted and answer.heartbeat_interval_s == 5.0
            again = wire.decode_registration_answer(await register(client, f"grpc://{endpoint}"))
            assert again.server_id == answer.server_id
            await (await infer(client, request()))
            beat = client.unary_unary(wire.HEARTBEAT)
            known = wire.decode_heartbeat_answer(
                await beat(wire.encode_heartbeat(answer.server_id))
            )
            assert known.registered
            unknown = wire.decode_heartbeat_answer(await beat(wire.encode_heartbeat("s-0")))
            assert not unknown.registered
            assert "register again" in unknown.message
            gateway.pool.registry.remove(answer.server_id)
            refused = wire.decode_registration_answer(await register(client, str(endpoint)))
            assert not refused.accepted
            assert "an operator has removed" in refused.message
        await server.stop()

    run(scenario())


@pytest.mark.parametrize(
    ("endpoint", "model", "words"),
    [
        ("nowhere", "pi05", "has no port"),
        ("10.0.0.1:0", "pi05", "must be from 1 to 65535"),
        ("10.0.0.1:50063", "", "must have 1 to 200 printable characters"),
    ],
)
def test_a_registration_that_cannot_be_is_answered_in_words(endpoint, model, words):
    async def scenario():
        async with fleet() as gateway, gateway.client() as client:
            answer = wire.decode_registration_answer(await register(client, endpoint, model))
            assert not answer.accepted
            assert words in answer.message
            assert gateway.pool.snapshot.servers == ()

    run(scenario())


def test_registering_asks_for_the_administrations_key_and_inference_for_either():
    async def scenario():
        async with (
            fleet(FakePolicyServer(), keys=Keys("robot", "operator")) as gateway,
            gateway.client() as client,
        ):
            call = client.unary_unary(wire.INFER)
            for metadata in (None, (("authorization", "Bearer wrong"),)):
                error = await failure(call(request(), metadata=metadata))
                assert error.code() is Code.UNAUTHENTICATED
                assert "authorization: Bearer KEY" in error.details()
            for key in ("robot", "operator"):
                await call(request(), metadata=(("authorization", f"Bearer {key}"),))
            error = await failure(register(client, "10.0.0.1:1", key="robot"))
            assert error.code() is Code.UNAUTHENTICATED
            answer = await register(client, "10.0.0.1:1", key="operator")
            assert wire.decode_registration_answer(answer).accepted
            stream = client.stream_stream(wire.COMMUNICATE)(iter(()))
            assert (await failure(stream.read())).code() is Code.UNAUTHENTICATED

    run(scenario())


def test_health_is_that_of_the_models_servers():
    async def scenario():
        server = FakePolicyServer()
        async with fleet(server) as gateway, gateway.client() as client:
            assert await health(client, "pi05")
            assert await health(client, "")
            assert not await health(client, "pi0")
            [known] = gateway.pool.snapshot.servers
            gateway.pool.registry.observe(known.server_id, Probe.UNREACHABLE, "refused")
            assert not await health(client, "pi05")

    run(scenario())


def test_large_observations_pass_and_larger_ones_than_allowed_do_not():
    async def scenario():
        server = FakePolicyServer()
        limits = GrpcLimits(max_message_bytes=1 << 20)
        async with fleet(server, limits=limits) as gateway, gateway.client() as client:
            image = np.zeros((3, 224, 224, 3), np.uint8)
            fits = request(images={"base": image}, instructions=("a",) * 3, batched=True)
            await (await infer(client, fits))
            larger = request(inputs={"x": np.zeros(1 << 20, np.uint8)})
            error = await failure(await infer(client, larger))
            assert error.code() is Code.RESOURCE_EXHAUSTED
            assert len(server.requests) == 1

    run(scenario())


def test_more_calls_at_once_than_allowed_are_refused():
    async def scenario():
        server = FakePolicyServer()
        server.behave = server.hold
        async with fleet(server, limits=GrpcLimits(max_calls=2)) as gateway:
            async with gateway.client() as client:
                calls = [await infer(client, request(f"r-{index}")) for index in range(2)]
                await server.arrived(2)
                error = await failure(await infer(client, request("r-2")))
                assert error.code() is Code.RESOURCE_EXHAUSTED
                assert await health(client, "pi05"), "control has places of its own"
                answer = await register(client, "10.0.0.1:1")
                assert wire.decode_registration_answer(answer).accepted
                server.release.set()
                await asyncio.gather(*calls)

    run(scenario())


def test_who_has_no_key_is_refused_before_a_message_and_takes_no_place():
    async def scenario():
        keys, limits = Keys("robot"), GrpcLimits(max_calls=1)
        async with fleet(FakePolicyServer(), keys=keys, limits=limits) as gateway:
            async with gateway.client() as client:
                for path in (wire.INFER, wire.CHECK_HEALTH, wire.REGISTER, wire.COMMUNICATE):
                    for _ in range(2):
                        call = client.stream_stream(path)()
                        with contextlib.suppress(grpc.aio.AioRpcError):
                            await call.wait_for_connection()
                        assert await call.code() is Code.UNAUTHENTICATED
                metadata = (("authorization", "Bearer robot"),)
                await client.unary_unary(wire.INFER)(request(), metadata=metadata)

    run(scenario())


def test_a_call_without_a_message_is_refused_in_words():
    async def scenario():
        async with fleet(FakePolicyServer()) as gateway, gateway.client() as client:
            call = client.stream_unary(wire.INFER)()
            await call.done_writing()
            error = await failure(call)
            assert error.code() is Code.INVALID_ARGUMENT
            assert error.details() == "the call has no message"

    run(scenario())


def test_an_unknown_method_is_unimplemented():
    async def scenario():
        async with fleet() as gateway, gateway.client() as client:
            error = await failure(client.unary_unary("/robot.inference.v1.ModelInference/X")(b""))
            assert error.code() is Code.UNIMPLEMENTED

    run(scenario())


def test_a_closing_front_lets_calls_end():
    async def scenario():
        entered, leave = asyncio.Event(), asyncio.Event()

        async def wait(data, context):
            entered.set()
            await leave.wait()
            return data

        front = GrpcFront(HOST, 0)
        front.add(Service("test.Echo", unary={"Wait": wait}, access=Access.OPEN))
        port = await front.start()
        async with grpc.aio.insecure_channel(f"{HOST}:{port}") as client:
            call = client.unary_unary("/test.Echo/Wait")
            running = asyncio.ensure_future(call(b"x").wait_for_connection())
            first = call(b"x")
            await entered.wait()
            closing = asyncio.ensure_future(front.close(30.0))
            leave.set()
            assert await first == b"x"
            await closing
            running.cancel()
            assert (await failure(call(b"y"))).code() is Code.UNAVAILABLE

    run(scenario())


def test_a_taken_port_is_told():
    async def scenario():
        first, second = GrpcFront(HOST, 0), GrpcFront(HOST, 0)
        port = await first.start()
        with pytest.raises(ConfigurationError, match=f"cannot listen on {HOST}:{port} for gRPC"):
            await GrpcFront(HOST, port).start()
        await second.start()
        await first.close()
        await second.close()

    run(scenario())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate")
def test_the_port_speaks_tls(tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=localhost", "-keyout", key, "-out", cert]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)

    async def scenario():
        async def echo(data, context):
            return data

        front = GrpcFront(HOST, 0, tls=Tls(cert.read_bytes(), key.read_bytes()))
        front.add(Service("test.Echo", unary={"Say": echo}))
        port = await front.start()
        trusted = grpc.ssl_channel_credentials(cert.read_bytes())
        async with grpc.aio.secure_channel(f"{HOST}:{port}", trusted) as client:
            assert await client.unary_unary("/test.Echo/Say")(b"hello") == b"hello"
        await front.close()
        with pytest.raises(ConfigurationError, match="certificate cannot be read"):
            await GrpcFront(HOST, 0, tls=Tls(b"no", b"no")).start()

    run(scenario())


def test_answers_are_those_of_the_server():
    async def scenario():
        async with fleet(FakePolicyServer()) as gateway, gateway.client() as client:
            assert await (await infer(client, request())) == answer_to(request())

    run(scenario())


def test_each_call_is_a_line_of_the_log_where_that_is_asked_for(caplog):
    caplog.set_level("INFO", "phalanx.gateway.access")

    async def scenario():
        entered, left = asyncio.Event(), asyncio.Event()

        async def wait(data, context):
            entered.set()
            try:
                await asyncio.Event().wait()
            finally:
                left.set()

        async def refuse(data, context):
            raise InvalidRequestError("no")

        async def echo(data, context):
            return data

        front = GrpcFront(HOST, 0, access_log=True, clock=ManualClock())
        front.add(Service("test.Log", unary={"Echo": echo, "Refuse": refuse, "Wait": wait}))
        port = await front.start()
        async with grpc.aio.insecure_channel(f"{HOST}:{port}") as client:
            await client.unary_unary("/test.Log/Echo")(b"")
            await failure(client.unary_unary("/test.Log/Refuse")(b""))
            waiting = client.unary_unary("/test.Log/Wait")(b"")
            await entered.wait()
            waiting.cancel()
            await left.wait()
        await front.close()
        lines = [record.getMessage() for record in caplog.records]
        assert [line.partition(" duration")[0] for line in lines] == [
            "method=/test.Log/Echo status=OK",
            "method=/test.Log/Refuse status=INVALID_ARGUMENT",
            "method=/test.Log/Wait status=CANCELLED",
        ]
        assert all("duration_ms=0.0 client=ipv4:127.0.0.1:" in line for line in lines)

    run(scenario())
