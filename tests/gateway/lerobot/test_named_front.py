"""Robots that are told apart by the host name that they connect to."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager

import grpc
import pytest

from phalanx.clock import SystemClock
from phalanx.errors import ConfigurationError
from phalanx.gateway.http.keys import Keys
from phalanx.gateway.lerobot import LeRobotService, LeRobotSettings, Listener
from phalanx.gateway.lerobot.named_front import NamedFront
from phalanx.gateway.workers import Workers
from phalanx.wire import lerobot as wire
from tests.gateway.lerobot.robots import FAST, PATIENT, Robot, refused, seen
from tests.gateway.policy_servers import HOST, FakePolicyServer, fleet, run


@asynccontextmanager
async def named(server, settings=FAST, **options):
    """The port behind which `server` is, its number, and the robots' service."""
    async with fleet(server) as gateway:
        workers = Workers(2)
        robots = LeRobotService(gateway.caller, workers, SystemClock(), settings)
        front = NamedFront(robots, Listener(HOST, 0, **options))
        try:
            yield await front.start(), robots
        finally:
            await front.close()
            await robots.close()
            workers.close()


def test_a_name_is_a_robot_whatever_its_connection():
    async def scenario():
        server = FakePolicyServer()
        async with named(server) as (port, robots):
            one, other = f"arm-1.localhost:{port}", f"arm-2.localhost:{port}"
            async with Robot(one) as robot:
                await robot.begin(policy_type="one")
                await robot.send(timestep=1)
                assert (await robot.acted())[0].timestep == 1
            async with Robot(other) as robot:
                await robot.begin(policy_type="other")
            for name, address in (("one", one), ("other", other)):
                async with Robot(address) as robot:
                    # Neither begins anew; each has its own settings.
                    assert await robot.get() == []
                    await robot.send(timestep=5)
                    assert (await robot.acted())[0].timestep == 5
                    lerobot = seen(server)[-1].observation.parameters["lerobot"]
                    assert lerobot["policy_type"] == name
            assert sorted(view.name.rpartition(" at ")[2] for view in robots.robots()) == [
                f"{one} (port {port})",
                f"{other} (port {port})",
            ]

    run(scenario())


def test_errors_reach_the_operator_in_words():
    async def scenario():
        async with named(FakePolicyServer()) as (port, _), Robot(f"{HOST}:{port}") as robot:
            error = await refused(robot.send())
            assert "restart the robot's client" in error.details()
            await robot.ready()
            error = await refused(robot.instruct(pretrained_name_or_path="pi0"))
            assert "'pi0' is not served here" in error.details()
            await robot.begin()
            part = wire.encode_upload_part(wire.TransferState.BEGIN, b"abc")
            error = await refused(robot.send_raw([part]))
            assert "without its END" in error.details()
            error = await refused(robot.send_raw([]))
            assert "no messages" in error.details()

    run(scenario())


def test_an_upload_that_does_not_go_on_is_ended_and_told_with_the_next_call():
    async def scenario():
        settings = LeRobotSettings(setup_wait_s=0.0, upload_timeout_s=0.05)
        server = FakePolicyServer()
        async with named(server, settings) as (port, _), Robot(f"{HOST}:{port}") as robot:
            await robot.begin()
            call = await robot.begin_upload()
            assert await call.code() is grpc.StatusCode.CANCELLED
            for told in (robot.send(timestep=3), robot.get()):
                error = await refused(told)
                assert "the upload did not end within 0.05 s" in error.details()
            # The later one was kept all the same.
            assert (await robot.acted())[0].timestep == 3

    run(scenario())


def test_a_robot_that_hangs_up_cancels_its_request():
    async def scenario():
        server = FakePolicyServer()
        async with named(server, PATIENT) as (port, _), Robot(f"{HOST}:{port}") as robot:
            await robot.begin()
            server.behave = server.hold
            await robot.send()
            asked = robot.asked()
            await server.arrived(2)
            asked.cancel()
            await server.cancelled.wait()

    run(scenario())


def test_many_robots_wait_at_once():
    async def scenario():
        server = FakePolicyServer()
        async with named(server, PATIENT) as (port, _):

            async def live(number: int) -> None:
                async with Robot(f"arm-{number}.localhost:{port}") as robot:
                    await robot.begin()
                    asked = robot.asked()
                    await robot.send(timestep=number)
                    (first, *_) = wire.decode_actions(wire.decode_data(await asked))
                    assert first.timestep == number

            await asyncio.gather(*(live(number) for number in range(12)))

    run(scenario())


def test_a_key_is_asked_for():
    async def scenario():
        keys = Keys("secret", None)
        async with named(FakePolicyServer(), keys=keys) as (port, _):
            async with Robot(f"{HOST}:{port}") as robot:
                error = await refused(robot.ready())
                assert error.code().name == "UNAUTHENTICATED"

    run(scenario())


def test_a_port_that_is_taken_is_named():
    async def scenario():
        async with named(FakePolicyServer()) as (port, robots):
            front = NamedFront(robots, Listener(HOST, port))
            with pytest.raises(ConfigurationError, match=f"{port} for LeRobot's clients"):
                await front.start()
            await front.close()

    run(scenario())


def test_a_call_without_the_key_takes_none_of_the_robots_threads():
    """It sends no message either, for which a handler would wait on its thread."""

    async def scenario():
        before = set(threading.enumerate())
        async with named(FakePolicyServer(), keys=Keys("secret", None)) as (port, _):
            async with grpc.aio.insecure_channel(f"{HOST}:{port}") as channel:
                for method in ("Ready", "GetActions", "SendObservations"):
                    call = channel.stream_unary(f"/{wire.SERVICE}/{method}")()
                    assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
                    assert "Bearer KEY" in await call.details()
            names = {thread.name for thread in threading.enumerate() if thread not in before}
            assert any(name.startswith("lerobot-refusal_") for name in names)
            assert not any(name.startswith("lerobot_") for name in names)

    run(scenario())
