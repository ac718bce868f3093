"""What callers of the gateway's gRPC address are told: servers' own statuses, and the gateway's."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from phalanx.wire import robot_inference as wire
from tests.gateway.policy_servers import (
    FakePolicyServer,
    actions,
    answer_to,
    failure,
    fleet,
    infer,
    refusing,
    request,
    run,
)

Code = grpc.StatusCode


def test_a_servers_status_and_metadata_arrive_as_they_are():
    async def scenario():
        words = "camera 'top' is not one of base, wrist; é"
        server = FakePolicyServer(refusing(Code.INVALID_ARGUMENT, words, [("hint", "base")]))
        async with fleet(server) as gateway, gateway.client() as client:
            error = await failure(await infer(client, request()))
            assert (error.code(), error.details()) == (Code.INVALID_ARGUMENT, words)
            assert dict(tuple(error.trailing_metadata()))["hint"] == "base"

            async def with_metadata(data, context):
                context.set_trailing_metadata((("served-by", "s"),))
                return answer_to(data)

            server.behave = with_metadata
            call = await infer(client, request())
            await call
            assert dict(tuple(await call.trailing_metadata()))["served-by"] == "s"

    run(scenario())


async def another_id(data, context):
    return answer_to(request("another"))


async def garbage(data, context):
    return b"\xff\xff"


async def nothing(data, context):
    return b""


@pytest.mark.parametrize(
    ("behave", "words"),
    [
        (another_id, "answered request 'another' instead of 'r-1'"),
        (garbage, "cannot be read"),
        (nothing, "answered request '' instead of 'r-1'"),
    ],
)
def test_an_answer_to_something_else_is_data_loss(behave, words):
    async def scenario():
        async with fleet(FakePolicyServer(behave)) as gateway, gateway.client() as client:
            error = await failure(await infer(client, request()))
            assert error.code() is Code.DATA_LOSS
            assert words in error.details()
            await gateway.all_left(1)
            assert gateway.codes == ["DATA_LOSS"]

    run(scenario())


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        (
            request(model_name="pi0"),
            Code.NOT_FOUND,
            "model 'pi0' is not served here; known: 'pi05'",
        ),
        (request(request_id=""), Code.INVALID_ARGUMENT, "request_id is missing"),
        (b"\xff\xff", Code.INVALID_ARGUMENT, "the message ends within"),
        (b"\x0a\x02r", Code.INVALID_ARGUMENT, "the message ends within a field"),
    ],
)
def test_what_no_server_can_take_is_refused_in_words(data, code, words):
    async def scenario():
        server = FakePolicyServer()
        async with fleet(server) as gateway, gateway.client() as client:
            error = await failure(await infer(client, data))
            assert error.code() is code
            assert words in error.details()
            assert server.requests == [] and gateway.codes == []

    run(scenario())


def test_a_request_without_a_model_goes_to_the_only_one():
    async def scenario():
        server = FakePolicyServer()
        async with fleet(server) as gateway, gateway.client() as client:
            await (await infer(client, request(model_name="")))
            other = FakePolicyServer()
            gateway.add(await other.start(), "pi0")
            error = await failure(await infer(client, request(model_name="")))
            assert error.code() is Code.NOT_FOUND
            assert "names no model, and there are several" in error.details()
            await other.stop()

    run(scenario())


def test_without_a_ready_server_the_caller_is_told_to_come_back():
    async def scenario():
        server = FakePolicyServer()
        async with fleet() as gateway, gateway.client() as client:
            gateway.pool.registry.register_managed("pi05", await server.start())
            error = await failure(await infer(client, request()))
            assert error.code() is Code.UNAVAILABLE
            assert "no server of model 'pi05' is ready" in error.details()
            metadata = dict(tuple(error.trailing_metadata()))
            assert (metadata["retry-after"], metadata[wire.NOT_STARTED]) == ("1", "1")
            await server.stop()

    run(scenario())


def test_the_actions_of_a_policy_pass_unchanged():
    async def scenario():
        async with fleet(FakePolicyServer()) as gateway, gateway.client() as client:
            answer = wire.decode_response(await (await infer(client, request())))
            np.testing.assert_array_equal(answer.actions.values, actions())

    run(scenario())
