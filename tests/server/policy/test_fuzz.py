"""Damaged and random messages on every protocol: refused in words, and the server serves on."""

from __future__ import annotations

import random

import grpc
import numpy as np
import pytest

from phalanx.schema.observation import Observation
from phalanx.testing.policy import FakePolicyArgs
from phalanx.wire.msgpack_numpy import pack
from phalanx.wire.robot_inference import InferenceCall, encode_request
from tests.server.policy.openpi_client import OpenpiConnection
from tests.server.policy.running import seen, serving

IMAGE = np.full((4, 4, 3), 7, np.uint8)
STATE = np.arange(4, dtype=np.float32)
REFUSED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
ROUNDS = [
    pytest.param(60, id="short"),
    pytest.param(2000, id="long", marks=pytest.mark.long),
]


@pytest.fixture(scope="module")
def server():
    args = FakePolicyArgs(cameras=("front", "main_images"))
    with serving(args, http_port=0, access_log=False) as running:
        yield running


def damaged(draw: random.Random, whole: bytes) -> bytes:
    """`whole` with bytes changed, cut, doubled or moved; or nothing of it."""
    data = bytearray(whole)
    for _ in range(draw.randint(1, 6)):
        if not data:
            break
        at = draw.randrange(len(data))
        match draw.randrange(5):
            case 0:
                data[at] = draw.randrange(256)
            case 1:
                del data[at:]
            case 2:
                data[at:at] = draw.randbytes(draw.randint(1, 9))
            case 3:
                data[at:at] = data[at : at + draw.randint(1, 40)]
            case 4:
                del data[at : at + draw.randint(1, 20)]
    return draw.randbytes(draw.randint(0, 200)) if draw.random() < 0.1 else bytes(data)


@pytest.mark.parametrize("rounds", ROUNDS)
def test_damaged_requests_over_grpc(server, rounds):
    draw = random.Random(5)
    call = InferenceCall("r1", "fake", Observation(images={"front": IMAGE}, state=STATE))
    whole = encode_request(call)
    with server.client() as client:
        for _ in range(rounds):
            data = damaged(draw, whole)
            try:
                client.raw(data)
            except grpc.RpcError as error:
                assert error.code() in REFUSED, (data, error.code(), error.details())
                assert error.details()
        assert client.healthy()
        client.infer(seen(images={"front": IMAGE}))


@pytest.mark.parametrize("rounds", ROUNDS)
def test_damaged_frames_over_openpi(server, rounds):
    draw = random.Random(6)
    frame = {"observation/front": IMAGE, "observation/state": STATE, "prompt": "go"}
    whole = pack(frame)
    with OpenpiConnection(server.url) as robot:
        for _ in range(rounds):
            robot.send(damaged(draw, whole))
            answer = robot.answer()
            assert answer if isinstance(answer, str) else "actions" in answer
            assert "the log of its server" not in str(answer)
        assert "actions" in robot.infer(frame)


@pytest.mark.parametrize("rounds", ROUNDS)
def test_damaged_bodies_over_http(server, rounds):
    draw = random.Random(7)
    whole = pack(
        {
            "model_name": "fake",
            "observation": {"main_images": IMAGE[None], "states": STATE[None]},
        }
    )
    headers = {"content-type": "application/msgpack"}
    with server.http() as client:
        for _ in range(rounds):
            data = damaged(draw, whole)
            response = client.post("/v1/actions/generations", content=data, headers=headers)
            assert response.status_code in (200, 400, 404, 413), (data, response.text)
        assert client.get("/healthz").status_code == 200
