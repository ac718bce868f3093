"""`POST /v1/actions/generations` at the gateway: answers, and a status in words for what fails."""

from __future__ import annotations

import asyncio
import json

import grpc
import numpy as np
import pytest

from phalanx.schema.observation import Actions
from phalanx.wire import robot_inference as wire
from phalanx.wire.msgpack_numpy import pack, unpack
from tests.gateway.adapters.running import HOST, robots
from tests.gateway.policy_servers import FakePolicyServer, actions, refusing, run

Code = grpc.StatusCode
FLAT = {
    "model_name": "pi05",
    "observation": {
        "main_images": np.zeros((2, 8, 8, 3), np.uint8),
        "states": np.zeros((2, 8)),
        "task_descriptions": ["pick", "place"],
    },
    "requested_action_horizon": 3,
}


def test_both_envelopes_are_answered_in_kind():
    async def scenario():
        server = FakePolicyServer()
        async with robots(server) as gateway:
            status, fields, body = await gateway.post(pack(FLAT))
            assert (status, fields["content-type"]) == (200, "application/msgpack")
            expected = np.stack([actions()] * 2)
            np.testing.assert_array_equal(unpack(body)["actions"], expected)
            rlinf = {"model": "pi05", "input": FLAT["observation"], "parameters": {"num_steps": 4}}
            status, _, body = await gateway.post(pack(rlinf), "application/x-msgpack; v=1")
            assert status == 200
            np.testing.assert_array_equal(unpack(body)["data"][0]["action"]["values"], expected)
            calls = [wire.decode_request(data) for data in server.requests]
            assert calls[0].observation.horizon == 3
            assert calls[1].observation.parameters == {"num_steps": 4}
            assert all(call.request_id for call in calls)

    run(scenario())


def test_a_large_batch_is_read_on_a_thread():
    async def scenario():
        large = {"observation": {"main_images": np.zeros((4, 224, 224, 3), np.uint8)}}
        async with robots(FakePolicyServer(), default_model="pi05") as gateway:
            status, _, body = await gateway.post(pack(large))
            assert status == 200
            assert unpack(body)["actions"].shape == (4, 3, 2)

    run(scenario())


@pytest.mark.parametrize(
    ("body", "content_type", "status", "code", "words"),
    [
        (b"{}", "application/json", 415, "unsupported_media_type", "'application/json' is not"),
        (b"\xc1", "application/msgpack", 400, "malformed_request", "extension type"),
        (pack([1]), "application/msgpack", 400, "malformed_request", "send a map"),
        (pack({}), "application/msgpack", 422, "invalid_request", "observation is missing"),
        (
            pack({**FLAT, "model_name": "pi0"}),
            "application/msgpack",
            404,
            "model_not_found",
            "model 'pi0' is not served here",
        ),
    ],
)
def test_what_is_wrong_with_a_request_is_told(body, content_type, status, code, words):
    async def scenario():
        async with robots(FakePolicyServer()) as gateway:
            got, fields, answer = await gateway.post(body, content_type)
            assert (got, fields["content-type"]) == (status, "application/json")
            error = json.loads(answer)["error"]
            assert error["code"] == code
            assert words in error["message"]

    run(scenario())


def test_a_larger_body_than_allowed_is_413():
    async def scenario():
        async with robots(FakePolicyServer(), max_body_bytes=1000) as gateway:
            status, _, _ = await gateway.post(b"\0" * 1001)
            assert status == 413

    run(scenario())


@pytest.mark.parametrize(
    ("upstream", "status", "code"),
    [
        (Code.INVALID_ARGUMENT, 422, "invalid_request"),
        (Code.NOT_FOUND, 404, "model_not_found"),
        (Code.RESOURCE_EXHAUSTED, 503, "overloaded"),
        (Code.UNAVAILABLE, 503, "unavailable"),
        (Code.DEADLINE_EXCEEDED, 504, "deadline_exceeded"),
        (Code.INTERNAL, 502, "bad_gateway"),
        (Code.DATA_LOSS, 502, "bad_gateway"),
        (Code.UNAUTHENTICATED, 502, "bad_gateway"),
    ],
)
def test_a_servers_status_has_its_http_status(upstream, status, code):
    async def scenario():
        async with robots(FakePolicyServer(refusing(upstream, "the words"))) as gateway:
            got, fields, answer = await gateway.post(pack(FLAT))
            assert got == status
            assert json.loads(answer)["error"] == {"code": code, "message": "the words"}
            assert ("retry-after" in fields) == (status == 503)

    run(scenario())


def test_without_a_ready_server_it_is_503_with_a_time_to_come_back():
    async def scenario():
        server = FakePolicyServer()
        async with robots() as gateway:
            gateway.fleet.pool.registry.register_managed("pi05", await server.start())
            status, fields, answer = await gateway.post(pack(FLAT))
            assert (status, fields["retry-after"]) == (503, "1")
            assert "no server of model 'pi05' is ready" in json.loads(answer)["error"]["message"]
            await server.stop()

    run(scenario())


async def wrong_rows(data, context):
    call = wire.decode_request(data)
    values = np.zeros((5, 3, 2), np.float32)
    return wire.encode_response(wire.InferenceAnswer(call.request_id, Actions(values)))


async def no_actions(data, context):
    return b"\x0a" + bytes([len(wire.peek(data).request_id)]) + wire.peek(data).request_id.encode()


@pytest.mark.parametrize(
    ("behave", "words"),
    [(wrong_rows, "(5, 3, 2) to a batch of 2"), (no_actions, "cannot be read: actions has")],
)
def test_an_answer_that_is_none_is_502(behave, words):
    async def scenario():
        async with robots(FakePolicyServer(behave)) as gateway:
            status, _, answer = await gateway.post(pack(FLAT))
            assert status == 502
            assert words in json.loads(answer)["error"]["message"]

    run(scenario())


def test_a_client_that_goes_away_cancels_its_request():
    async def scenario():
        server = FakePolicyServer()
        server.behave = server.hold
        async with robots(server) as gateway:
            body = pack(FLAT)
            _, writer = await asyncio.open_connection(HOST, gateway.port)
            writer.write(
                b"POST /v1/actions/generations HTTP/1.1\r\nhost: g\r\n"
                b"content-type: application/msgpack\r\ncontent-length: %d\r\n\r\n%b"
                % (len(body), body)
            )
            await server.arrived()
            writer.transport.abort()
            await server.cancelled.wait()
            await gateway.fleet.all_left(1)

    run(scenario())
