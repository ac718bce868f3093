"""The seven defects of LeRobot's own pair of client and server: none of them is here."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from phalanx.testing import ManualClock
from phalanx.wire.robot_inference import NOT_STARTED
from tests.gateway.lerobot.robots import FAST, IMAGE, SENSORS, port, refused, seen, told
from tests.gateway.policy_servers import FakePolicyServer, answer_to, refusing, run
from tests.wire.lerobot.pickles import features

Code = grpc.StatusCode


def test_defect_a6_1_a_failed_inference_does_not_end_the_control_loop():
    async def scenario():
        server = FakePolicyServer()
        async with port(server) as gateway, gateway.robot() as robot:
            await robot.begin()
            server.behave = refusing(Code.INTERNAL, "the policy failed")
            await robot.send(timestep=20, must_go=True)
            error = await refused(robot.get())
            assert (error.code(), error.details()) == (Code.INTERNAL, "the policy failed")
            server.behave = FakePolicyServer().behave
            # Nothing new is sent: the same observation is answered.
            assert (await robot.acted())[0].timestep == 20
            # And later ones, which are not must_go and of the same step, as the client sends them.
            server.behave = refusing(Code.INTERNAL, "the policy failed again")
            await robot.send(timestep=22, must_go=True)
            await refused(robot.get())
            server.behave = FakePolicyServer().behave
            await refused(robot.send(timestep=22))
            assert (await robot.acted())[0].timestep == 22

    run(scenario())


def test_defect_a6_1_a_lost_server_does_not_end_the_control_loop():
    async def scenario():
        lost, other = FakePolicyServer(), FakePolicyServer()
        async with port(lost) as gateway, gateway.robot() as robot:
            await robot.begin()
            lost.behave = lost.hold
            await robot.send(timestep=4, must_go=True)
            asked = robot.asked()
            await lost.arrived(2)
            await lost.stop()
            error = await refused(asked)
            # UNAVAILABLE would make the client's channel send again by itself.
            assert error.code() is Code.ABORTED
            gateway.fleet.add(await other.start())
            assert (await robot.acted())[0].timestep == 4
            await other.stop()

    run(scenario())


@pytest.mark.parametrize(
    ("words", "metadata"), [("busy", ((NOT_STARTED, "1"),)), ("the device is out of memory", ())]
)
def test_defect_a6_1_a_busy_server_does_not_lose_the_observation(words, metadata):
    async def scenario():
        server = FakePolicyServer()
        async with port(server) as gateway, gateway.robot() as robot:
            await robot.begin()
            server.behave = refusing(Code.RESOURCE_EXHAUSTED, words, metadata)
            await robot.send(timestep=4, must_go=True)
            assert (await refused(robot.get())).details() == words
            server.behave = FakePolicyServer().behave
            assert (await robot.acted())[0].timestep == 4

    run(scenario())


def test_defect_a6_2_robots_on_one_server_have_nothing_in_common():
    async def scenario():
        async def behave(data, context):
            from phalanx.wire.robot_inference import decode_request

            state = decode_request(data).observation.state
            return answer_to(data, np.stack([state, state]))

        async with port(FakePolicyServer(behave)) as gateway:
            async with gateway.robot() as a, gateway.robot() as b:
                await a.begin()
                await a.send({**SENSORS, "j0.pos": 31.0}, timestep=31)
                # B's Ready must not drop what A sent, nor B get A's actions.
                await b.begin()
                asked = b.asked()
                actions = await a.acted()
                assert (actions[0].timestep, actions[0].values[0]) == (31, 31.0)
                # The same state as A's is not "too similar" to anything of B's.
                await b.send({**SENSORS, "j0.pos": 31.0}, timestep=0)
                assert await asked
                assert [view.num_answered for view in gateway.robots.robots()] == [1, 1]

    run(scenario())


def test_defect_a6_3_a_wrong_width_of_the_state_is_told_in_words():
    async def scenario():
        words = "robot_state has 6 numbers; this policy takes 8"
        server = FakePolicyServer(refusing(Code.INVALID_ARGUMENT, words))
        async with port(server) as gateway, gateway.robot() as robot:
            await robot.ready()
            declared = features(("front", (4, 6, 3)), joints=6)
            error = await refused(robot.instruct(lerobot_features=declared))
            assert (error.code(), error.details()) == (Code.INVALID_ARGUMENT, words)
            # Also where it comes out only later.
            server.behave = FakePolicyServer().behave
            await robot.begin()
            server.behave = refusing(Code.INVALID_ARGUMENT, words)
            await robot.send()
            assert (await refused(robot.get())).details() == words
            assert (await refused(robot.send())).details() == words

    run(scenario())


def test_defect_a6_4_a_missing_camera_is_told_in_words_and_the_next_observation_is_answered():
    async def scenario():
        async with port(FakePolicyServer()) as gateway, gateway.robot() as robot:
            await robot.begin(lerobot_features=features(("front", (4, 6, 3)), ("wrist", (4, 6, 3))))
            await robot.send()
            error = await refused(robot.get())
            assert error.code() is Code.INVALID_ARGUMENT
            assert "no camera 'wrist', which the robot declared" in error.details()
            error = await refused(robot.send({**SENSORS, "wrist": IMAGE}))
            assert "no camera 'wrist'" in error.details()
            assert len(await robot.acted()) == 3
            await robot.send({**SENSORS, "wrist": IMAGE})

    run(scenario())


def test_defect_a6_5_an_answer_grows_with_its_numbers_alone():
    async def scenario():
        sizes = {}
        for horizon, width in ((50, 6), (50, 32), (100, 14), (200, 32)):

            async def behave(data, context, shape=(horizon, width)):
                return answer_to(data, np.ones(shape, np.float32))

            async with port(FakePolicyServer(behave)) as gateway, gateway.robot() as robot:
                await robot.begin(actions_per_chunk=horizon)
                await robot.send()
                sizes[horizon, width] = len(await robot.asked())
        for (horizon, width), size in sizes.items():
            assert size < 4 * horizon * width + 100 * horizon + 1000
        # LeRobot's own server: 75,905, 335,976, 591,742 and 5.2 million bytes.
        assert sizes[200, 32] < 50_000

    run(scenario())


def test_defect_a6_6_policy_instructions_load_nothing():
    async def scenario():
        words = "tokenizer_dir is missing; give adapter.args.tokenizer_dir"
        server = FakePolicyServer()
        async with port(server, model="google/paligemma-3b-pt-224") as gateway:
            async with gateway.robot() as robot:
                await robot.begin(pretrained_name_or_path="google/paligemma-3b-pt-224")
                assert len(server.requests) == 1
            async with gateway.robot() as robot:
                await robot.ready()
                server.behave = refusing(Code.FAILED_PRECONDITION, words)
                error = await refused(
                    robot.instruct(pretrained_name_or_path="google/paligemma-3b-pt-224")
                )
                assert error.details() == words

    run(scenario())


def test_defect_a6_7_a_policy_that_one_frame_is_not_enough_for_says_so():
    async def scenario():
        words = "this policy takes 2 observations, one was sent"
        server = FakePolicyServer(refusing(Code.INVALID_ARGUMENT, words))
        async with port(server) as gateway, gateway.robot() as robot:
            await robot.ready()
            assert (await refused(robot.instruct())).details() == words
            # Any policy type is passed on: there is no list of those that are known.
            server.behave = FakePolicyServer().behave
            await robot.begin(policy_type="xvla")
            await robot.send()
            await robot.acted()
            lerobot = seen(server)[0].observation.parameters["lerobot"]
            assert lerobot["policy_type"] == "xvla"

    run(scenario())


def test_defects_are_told_once_a_second_not_with_every_call():
    async def scenario():
        server = FakePolicyServer()
        clock = ManualClock()
        async with (
            port(server, settings=FAST, clock=clock) as gateway,
            gateway.robot() as robot,
        ):
            await robot.begin()
            server.behave = refusing(Code.INTERNAL, "the policy failed")
            await robot.send()
            assert (await told(robot)).details() == "the policy failed"
            assert await robot.get() == []
            assert await robot.get() == []
            assert gateway.view().fault == "the policy failed"
            clock.advance(1.0)
            assert (await told(robot)).details() == "the policy failed"

    run(scenario())
