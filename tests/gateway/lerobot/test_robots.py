"""LeRobot's clients through the gateway: requests, answers, and which observation is answered."""

from __future__ import annotations

import asyncio
import time

import grpc
import numpy as np
import pytest

from phalanx.gateway.lerobot import LeRobotSettings
from phalanx.wire import lerobot as wire
from tests.gateway.lerobot.robots import (
    FAST,
    IMAGE,
    PATIENT,
    SENSORS,
    Robot,
    messages,
    port,
    refused,
    seen,
)
from tests.gateway.policy_servers import FakePolicyServer, actions, answer_to, refusing, run
from tests.wire.lerobot.pickles import EARLIER, features, observation, recorded

Code = grpc.StatusCode


def test_r105_a_client_of_lerobot_gets_actions_for_its_observation():
    async def scenario():
        server = FakePolicyServer()
        async with port(server) as gateway, gateway.robot() as robot:
            await robot.begin()
            await robot.send(timestep=7, timestamp=time.time())
            got = await robot.acted()
            (call,) = seen(server)
            assert np.array_equal(call.observation.images["front"], IMAGE)
            assert call.observation.state.tolist() == [0.5, 1.5]
            assert call.observation.instructions == ("pick",)
            assert call.observation.horizon == 8
            assert call.observation.parameters["lerobot"]["policy_type"] == "pi05"
            assert call.model_name == "pi05"
            assert [action.timestep for action in got] == [7, 8, 9]
            assert np.array_equal([action.values for action in got], actions())
            first = call.timestamp_ns / 1e9
            assert np.allclose([a.timestamp_s - first for a in got], [0, 1 / 30, 2 / 30], atol=1e-5)

    run(scenario())


def test_r105_the_recorded_messages_of_a_client_are_served():
    async def scenario():
        server = FakePolicyServer()
        async with port(server) as gateway, gateway.robot() as robot:
            await robot.ready()
            data = recorded("remote_policy_config").replace(b"\x05/ckpt", b"\x05pi05x")
            call = robot._channel.unary_unary(wire.SEND_POLICY_INSTRUCTIONS)
            error = await refused(call(wire.encode_data(data)))
            assert "pi05x" in error.details()
            gateway.fleet.add(server.endpoint, "/ckpt")
            await call(wire.encode_data(recorded("remote_policy_config")))
            await robot.send_raw(messages(recorded("timed_observation_480p_x2")))
            assert [action.timestep for action in await robot.acted()] == [0, 1, 2]
            (seen_call,) = seen(server)
            assert list(seen_call.observation.images) == ["front", "wrist"]

    # The recording's clock is not today's, of which its robot is told with its next observation.
    run(scenario())


def test_r106_a_model_that_is_not_served_is_told_before_the_robot_moves():
    async def scenario():
        async with port(FakePolicyServer()) as gateway, gateway.robot() as robot:
            await robot.ready()
            error = await refused(robot.instruct(pretrained_name_or_path="pi0"))
            assert error.code() is Code.NOT_FOUND
            assert "'pi0' is not served here; known: 'pi05'" in error.details()

    run(scenario())


def test_r106_cameras_and_joints_that_are_not_the_policys_are_told_before_the_robot_moves():
    async def scenario():
        server = FakePolicyServer(
            refusing(
                Code.INVALID_ARGUMENT, "image 'front' is not one of this policy's: base, wrist"
            )
        )
        async with port(server) as gateway, gateway.robot() as robot:
            await robot.ready()
            error = await refused(robot.instruct())
            assert error.code() is Code.INVALID_ARGUMENT
            assert "not one of this policy's: base, wrist" in error.details()

    run(scenario())


def test_r106_a_control_rate_that_is_not_the_gateways_is_noted(caplog):
    async def scenario():
        async with port(FakePolicyServer()) as gateway, gateway.robot() as robot:
            await robot.begin()
            start = time.time()
            for step in range(0, 40, 4):
                await robot.send(timestep=step, timestamp=start + step / 60)
                await robot.acted()
            assert gateway.view().actions_per_s == pytest.approx(60)

    run(scenario())
    assert "takes 60.0 actions a second" in caplog.text
    assert "--lerobot-fps 60" in caplog.text


def test_r107_observations_of_one_robot_go_to_different_servers():
    async def scenario():
        servers = FakePolicyServer(), FakePolicyServer()
        async with port(*servers) as gateway, gateway.robot() as robot:
            await robot.begin()
            for step in range(0, 24, 4):
                await robot.send(timestep=step)
                assert [action.timestep for action in await robot.acted()][0] == step
            assert all(seen(server) for server in servers)
            assert sum(len(seen(server)) for server in servers) == 6

    run(scenario())


def test_the_latest_observation_is_answered():
    async def scenario():
        server = FakePolicyServer()
        async with port(server) as gateway, gateway.robot() as robot:
            await robot.begin()
            for step in range(3):
                await robot.send(timestep=step)
            assert (await robot.acted())[0].timestep == 2
            assert gateway.view().num_replaced == 2
            assert len(seen(server)) == 1

    run(scenario())


def test_an_observation_is_acknowledged_before_it_is_read():
    async def scenario():
        async with port(FakePolicyServer()) as gateway, gateway.robot() as robot:
            await robot.begin()
            await robot.send_raw(messages(b"\x80\x04not a pickle"))
            error = await refused(robot.get())
            assert error.code() is Code.INVALID_ARGUMENT
            assert "pickle is refused" in error.details()

    run(scenario())


def test_without_an_observation_the_answer_is_empty_after_a_while():
    async def scenario():
        async with port(FakePolicyServer(), settings=FAST) as gateway, gateway.robot() as robot:
            await robot.begin()
            assert await robot.get() == []

    run(scenario())


def test_a_slow_request_is_answered_by_a_later_call():
    async def scenario():
        server = FakePolicyServer()
        async with port(server, settings=FAST) as gateway, gateway.robot() as robot:
            await robot.begin()
            server.behave = server.hold
            await robot.send()
            assert await robot.get() == []
            await server.arrived(2)
            assert await robot.get() == []
            server.release.set()
            assert len(await robot.acted()) == 3
            assert len(seen(server)) == 1

    run(scenario())


def test_what_was_sent_before_the_answer_is_not_answered_while_the_robot_has_actions():
    async def scenario():
        server = FakePolicyServer()
        async with port(server, settings=FAST) as gateway, gateway.robot() as robot:
            await robot.begin()
            server.behave = server.hold
            asked = robot.asked()
            await robot.send(timestep=5)
            await server.arrived(2)
            await robot.send(timestep=6)
            server.release.set()
            while not await asked:
                asked = robot.asked()
            assert await robot.get() == []
            assert gateway.view().num_outdated == 1
            await robot.send(timestep=6)
            assert (await robot.acted())[0].timestep == 6
            view = gateway.view()
            assert (view.num_observations, view.num_answered, view.num_replaced) == (3, 2, 0)

    run(scenario())


@pytest.mark.parametrize("waiting", [{"timestep": 7}, {"timestep": 6, "must_go": True}])
def test_a_robot_that_has_run_out_of_actions_is_always_answered(waiting):
    async def scenario():
        server = FakePolicyServer()
        async with port(server) as gateway, gateway.robot() as robot:
            await robot.begin()
            server.behave = server.hold
            asked = robot.asked()
            await robot.send(timestep=5)
            await server.arrived(2)
            await robot.send(**waiting)
            server.release.set()
            assert await asked
            assert (await robot.acted())[0].timestep == waiting["timestep"]

    run(scenario())


def test_an_inference_that_takes_too_long_is_told_and_the_newest_observation_goes_on():
    async def scenario():
        server = FakePolicyServer()
        settings = LeRobotSettings(poll_s=30.0, setup_wait_s=0.0, infer_timeout_s=0.05)
        async with port(server, settings=settings) as gateway, gateway.robot() as robot:
            await robot.begin()
            server.behave = server.hold
            await robot.send(timestep=3)
            error = await refused(robot.get())
            await server.cancelled.wait()
            assert error.code() is Code.ABORTED
            assert "no actions came within 0.05 s" in error.details()
            server.release.set()
            error = await refused(robot.send(timestep=7))
            assert "--lerobot-timeout-s" in error.details()
            assert (await robot.acted())[0].timestep == 7

    run(scenario())


def test_a_robot_that_hangs_up_cancels_its_request_and_is_answered_when_it_asks_again():
    async def scenario():
        server = FakePolicyServer()
        async with port(server) as gateway, gateway.robot() as robot:
            await robot.begin()
            server.behave = server.hold
            await robot.send(timestep=3)
            asked = robot.asked()
            await server.arrived(2)
            asked.cancel()
            await server.cancelled.wait()
            server.release.set()
            assert (await robot.acted())[0].timestep == 3

    run(scenario())


def test_a_later_call_for_actions_takes_the_place_of_an_earlier_one():
    async def scenario():
        server = FakePolicyServer()
        async with port(server) as gateway, gateway.robot() as robot:
            await robot.begin()
            server.behave = server.hold
            await robot.send()
            first = robot.asked()
            await server.arrived(2)
            second = robot.asked()
            assert await first == b""
            server.release.set()
            assert await second
            assert len(seen(server)) == 1

    run(scenario())


def test_horizon_is_what_the_robot_asks_for_at_most():
    async def scenario():
        async with port(FakePolicyServer()) as gateway, gateway.robot() as robot:
            await robot.begin(actions_per_chunk=2)
            await robot.send()
            assert len(await robot.acted()) == 2

    run(scenario())


def test_an_earlier_client_gets_its_own_classes():
    async def scenario():
        async with port(FakePolicyServer()) as gateway, gateway.robot() as robot:
            await robot.begin(module=EARLIER)
            await robot.send(module=EARLIER)
            assert EARLIER.encode() in await robot.asked()

    run(scenario())


def test_a_large_observation_comes_in_parts():
    async def scenario():
        server = FakePolicyServer()
        shape = (1000, 1000, 3)
        async with port(server) as gateway, gateway.robot() as robot:
            await robot.begin(lerobot_features=features(("front", shape)))
            sensors = {**SENSORS, "front": np.full(shape, 7, np.uint8)}
            assert len(messages(observation(sensors))) == 2
            await robot.send(sensors)
            await robot.acted()
            assert seen(server)[0].observation.images["front"].shape == shape

    run(scenario())


def test_several_robots_at_once_each_with_its_own_policy():
    async def scenario():
        servers = FakePolicyServer(), FakePolicyServer()
        async with port(servers[0]) as gateway:
            gateway.fleet.add(await servers[1].start(), "act")

            async def live(index: int) -> None:
                async with Robot(gateway.at) as robot:
                    model = ("pi05", "act")[index % 2]
                    declared = features((f"c{index}", (4, 6, 3)), joints=index)
                    await robot.begin(pretrained_name_or_path=model, lerobot_features=declared)
                    joints = {f"j{joint}.pos": float(index) for joint in range(index)}
                    for step in range(index, index + 12, 4):
                        await robot.send({f"c{index}": IMAGE, **joints}, timestep=step)
                        assert (await robot.acted())[0].timestep == step

            await asyncio.gather(*(live(index) for index in range(1, 7)))
            for number, server in enumerate(servers):
                calls = seen(server)
                assert len(calls) == 9
                for call in calls:
                    ((camera, _),) = call.observation.images.items()
                    index = int(camera[1:])
                    assert index % 2 == number
                    assert call.observation.state.tolist() == [index] * index
            await servers[1].stop()

    run(scenario())


def test_actions_that_no_client_could_take_are_told():
    async def scenario():
        async def behave(data, context):
            return answer_to(data, np.zeros((5000, 400), np.float32))

        server = FakePolicyServer()
        async with port(server) as gateway, gateway.robot() as robot:
            await robot.begin(actions_per_chunk=5000)
            server.behave = behave
            await robot.send()
            error = await refused(robot.get())
            assert "--actions_per_chunk" in error.details()

    run(scenario())


def test_actions_that_are_not_finite_never_reach_the_robot():
    async def scenario():
        async def behave(data, context):
            return answer_to(data, np.full((3, 2), np.nan, np.float32))

        server = FakePolicyServer()
        async with port(server) as gateway, gateway.robot() as robot:
            await robot.begin()
            server.behave = behave
            await robot.send()
            error = await refused(robot.get())
            assert "not finite" in error.details()

    run(scenario())


def test_settings_wait_for_a_server_to_become_ready():
    async def scenario():
        server = FakePolicyServer()
        settings = LeRobotSettings(setup_wait_s=30.0)
        async with port(settings=settings) as gateway, gateway.robot() as robot:
            endpoint = await server.start()
            gateway.fleet.pool.registry.register_managed("pi05", endpoint)
            await robot.ready()
            setting = asyncio.ensure_future(robot.instruct())
            await gateway.unserved.wait()
            gateway.fleet.add(endpoint)
            await setting
            await server.stop()

    run(scenario())
    assert PATIENT.setup_wait_s == 0.0
