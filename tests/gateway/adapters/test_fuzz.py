"""Whatever robots send to the gateway gets an answer in words: `make test-long` tries for longer."""

from __future__ import annotations

import random
import time

import grpc
import numpy as np
import psutil
import pytest

from phalanx.wire.msgpack_numpy import pack
from tests.gateway.adapters.running import Robots, robots
from tests.gateway.policy_servers import FakePolicyServer, answer_to, infer, request, run
from tests.wire.fuzzing import LONG_S, spoilt

IMAGES = np.zeros((2, 8, 8, 3), np.uint8)
ACTIONS = (
    pack({"model_name": "pi05", "observation": {"main_images": IMAGES, "states": [[0.5], [1.0]]}}),
    pack({"model": "pi05", "input": {"wrist_images": IMAGES}, "parameters": {"num_steps": 4}}),
)
FRAMES = (
    pack({"observation/image": IMAGES[0], "observation/state": np.zeros(3), "prompt": "go"}),
    pack({"images": {"top": IMAGES}, "prompt": ["a", "b"]}),
)
INFERENCE = (request(images={"base": IMAGES[0]}, state=np.zeros(3, np.float32)),)
STATUSES = {200, 400, 404, 413, 422, 502}
CODES = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.DATA_LOSS}


async def post(gateway: Robots, source: random.Random) -> None:
    status, _, answer = await gateway.post(spoilt(source.choice(ACTIONS), source))
    assert status in STATUSES
    assert answer


async def send(gateway: Robots, source: random.Random) -> None:
    async with gateway.openpi() as client:
        for _ in range(8):
            client.send(spoilt(source.choice(FRAMES), source))
            assert await client.receive()


async def call(gateway: Robots, source: random.Random) -> None:
    async with gateway.fleet.client() as channel:
        for _ in range(8):
            try:
                await (await infer(channel, spoilt(source.choice(INFERENCE), source)))
            except grpc.aio.AioRpcError as error:
                assert error.code() in CODES


async def behave(data, context):
    """A server that refuses in its own way what it cannot read."""
    try:
        return answer_to(data)
    except ValueError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))


def fuzz(protocol, seconds: float) -> None:
    async def scenario():
        source = random.Random(11)
        async with robots(FakePolicyServer(behave), default_model="pi05") as gateway:
            memory = psutil.Process().memory_info
            before, end = memory().rss, time.monotonic() + seconds
            while True:
                await protocol(gateway, source)
                if time.monotonic() >= end:
                    break
            assert memory().rss - before < 200 << 20
            status, _, _ = await gateway.post(ACTIONS[0])
            assert status == 200
            assert gateway.fleet.in_flight == 0

    run(scenario())


PROTOCOLS = pytest.mark.parametrize("protocol", [post, send, call])


@PROTOCOLS
def test_a_few_spoilt_messages(protocol):
    fuzz(protocol, 0.0)


@pytest.mark.long
@PROTOCOLS
def test_spoilt_messages_for_long(protocol):
    fuzz(protocol, LONG_S)
