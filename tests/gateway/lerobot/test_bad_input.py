"""What a robot gets wrong reaches its operator in words, and the next observation is answered."""

from __future__ import annotations

import math
import time

import grpc
import numpy as np
import pytest

from phalanx.gateway.lerobot import LeRobotSettings
from phalanx.wire import lerobot as wire
from tests.gateway.lerobot.robots import FAST, IMAGE, SENSORS, messages, port, refused
from tests.gateway.policy_servers import FakePolicyServer, run
from tests.wire.lerobot.malicious import CORPUS

Code = grpc.StatusCode


@pytest.mark.parametrize(
    ("sensors", "words"),
    [
        ({**SENSORS, "front": IMAGE[:2]}, "shape (2, 6, 3), not uint8 of shape (4, 6, 3)"),
        ({**SENSORS, "front": IMAGE.astype(np.float32)}, "sent float32"),
        ({**SENSORS, "j1.pos": math.nan}, "joint 'j1.pos' is nan"),
        ({"front": IMAGE, "j0.pos": 1.0}, "no joint 'j1.pos'"),
        ({"image": IMAGE, "j0.pos": 1.0, "j1.pos": 1.0}, "no camera 'front'"),
    ],
)
def test_an_observation_that_does_not_fit(sensors, words):
    async def scenario():
        async with port(FakePolicyServer()) as gateway, gateway.robot() as robot:
            await robot.begin()
            await robot.send(sensors)
            polled = await refused(robot.get())
            sent = await refused(robot.send())
            for error in (polled, sent):
                assert error.code() is Code.INVALID_ARGUMENT
                assert words in error.details()
            assert len(await robot.acted()) == 3

    run(scenario())


def test_a_pickle_that_would_do_harm():
    async def scenario():
        async with port(FakePolicyServer()) as gateway, gateway.robot() as robot:
            await robot.begin()
            await robot.send_raw(messages(CORPUS["in_an_observation"]))
            error = await refused(robot.get())
            assert "names 'posix.system', which is not allowed" in error.details()
            call = robot._channel.unary_unary(wire.SEND_POLICY_INSTRUCTIONS)
            error = await refused(call(wire.encode_data(CORPUS["os_system_4"])))
            assert error.code() is Code.INVALID_ARGUMENT

    run(scenario())


def test_half_an_upload():
    async def scenario():
        async with port(FakePolicyServer()) as gateway, gateway.robot() as robot:
            await robot.begin()
            part = wire.encode_upload_part(wire.TransferState.BEGIN, b"abc")
            error = await refused(robot.send_raw([part]))
            assert error.code() is Code.INVALID_ARGUMENT
            assert "stopped after 3 bytes without its END" in error.details()
            await robot.send()
            assert await robot.acted()

    run(scenario())


def test_an_upload_that_does_not_go_on():
    async def scenario():
        settings = LeRobotSettings(setup_wait_s=0.0, upload_timeout_s=0.05)
        async with port(FakePolicyServer(), settings=settings) as gateway, gateway.robot() as robot:
            await robot.begin()
            error = await refused(await robot.begin_upload())
            assert error.code() is Code.INVALID_ARGUMENT
            assert "the upload did not end within 0.05 s" in error.details()
            await robot.send()
            assert await robot.acted()

    run(scenario())


def test_an_upload_that_is_too_large():
    async def scenario():
        settings = LeRobotSettings(setup_wait_s=0.0, max_upload_bytes=1000)
        async with port(FakePolicyServer(), settings=settings) as gateway, gateway.robot() as robot:
            await robot.begin()
            error = await refused(robot.send_raw(messages(bytes(1001))))
            assert error.code() is Code.RESOURCE_EXHAUSTED
            assert "more than 1000 bytes" in error.details()
            await robot.send()
            assert await robot.acted()

    run(scenario())


@pytest.mark.parametrize(("offset", "words"), [(100.0, "ahead of"), (-100.0, "behind")])
def test_a_clock_that_is_wrong_is_told_once_and_the_robot_is_served(offset, words, caplog):
    async def scenario():
        async with port(FakePolicyServer()) as gateway, gateway.robot() as robot:
            await robot.begin()
            now = time.time() + offset
            await robot.send(timestamp=now)
            assert (await robot.acted())[0].timestamp_s == now
            error = await refused(robot.send(timestamp=now, timestep=2))
            assert f"the robot's clock is 100.0 s {words} the gateway's" in error.details()
            assert (await robot.acted())[0].timestep == 2
            await robot.send(timestamp=now, timestep=4)

    run(scenario())
    assert f"100.0 s {words}" in caplog.text


def test_an_observation_before_policy_instructions():
    async def scenario():
        async with port(FakePolicyServer(), settings=FAST) as gateway, gateway.robot() as robot:
            await robot.ready()
            error = await refused(robot.send())
            assert "sent no policy instructions" in error.details()
            assert await robot.get() == []

    run(scenario())


def test_settings_that_are_no_settings():
    async def scenario():
        async with port(FakePolicyServer()) as gateway, gateway.robot() as robot:
            await robot.ready()
            error = await refused(robot.instruct(actions_per_chunk=0))
            assert "actions_per_chunk=0 must be from 1" in error.details()

    run(scenario())


def test_a_robot_that_nobody_knows():
    async def scenario():
        async with port(FakePolicyServer()) as gateway, gateway.robot() as robot:
            error = await refused(robot.send())
            assert "restart the robot's client" in error.details()

    run(scenario())
