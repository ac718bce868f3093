"""Which robot a call is from: connections, returns after a break, ports, and ids."""

from __future__ import annotations

import grpc
import pytest

from phalanx.errors import InvalidRequestError
from phalanx.gateway.lerobot.caller import Caller
from phalanx.gateway.lerobot.overlaps import NUM_OVERLAPS
from phalanx.gateway.lerobot.session import Session
from phalanx.gateway.lerobot.sessions import AWAY_S, FOLLOWED_S, LIVE_S, Sessions
from phalanx.gateway.lerobot.settings import LeRobotSettings
from phalanx.testing import ManualClock
from phalanx.wire.lerobot import decode_policy_instructions
from tests.gateway.lerobot.robots import FAST, SENSORS, Robot, port, refused, seen
from tests.gateway.policy_servers import FakePolicyServer, run
from tests.wire.lerobot.pickles import config, features

SETTINGS = LeRobotSettings(expiry_s=600.0, max_sessions=4)


class Desk:
    """Sessions and their clock."""

    def __init__(self):
        self.clock = ManualClock()
        self.sessions = Sessions(
            lambda name: Session(name, None, SETTINGS, self.clock), SETTINGS, self.clock
        )

    def begin(self, peer, address="port 1", **changed):
        session = self.sessions.begin(Caller(peer, address))
        data = config(**changed)
        session.instruct(decode_policy_instructions(data), data)
        return session

    def find(self, peer, address="port 1"):
        return self.sessions.find(Caller(peer, address))

    def away(self):
        self.clock.advance(AWAY_S)


def desk(scenario):
    """Run on a loop, which sessions belong to."""

    async def running():
        await scenario(Desk())

    run(running())


A, A2, A3 = (f"ipv4:10.0.0.1:{port}" for port in (50, 51, 52))
B, FAR = "ipv4:10.0.0.2:50", "ipv4:10.0.0.9:7"


def test_a_connection_is_a_session():
    async def scenario(desk):
        a, b = desk.begin(A), desk.begin(B)
        assert a is not b
        assert (desk.find(A), desk.find(B)) == (a, b)
        assert desk.begin(A) is a

    desk(scenario)


def test_a_new_connection_takes_over_the_session_that_lost_its_own():
    async def scenario(desk):
        a, b = desk.begin(A), desk.begin(B, pretrained_name_or_path="other")
        desk.away()
        assert desk.find(A2) is a
        assert desk.find(B) is b
        with pytest.raises(InvalidRequestError, match="does not know this robot"):
            desk.find(A2, "port 2")

    desk(scenario)


def test_a_session_in_use_is_not_taken_over():
    async def scenario(desk):
        a = desk.begin(A)
        with desk.sessions.calling(a):
            desk.away()
            with pytest.raises(InvalidRequestError):
                desk.find(A2)
        with pytest.raises(InvalidRequestError):
            desk.find(A2)
        desk.away()
        assert desk.find(A2) is a

    desk(scenario)


def test_a_robot_that_may_be_one_of_several_is_not_guessed():
    async def scenario(desk):
        desk.begin(A, pretrained_name_or_path="one")
        desk.begin(A2, pretrained_name_or_path="other")
        desk.away()
        with pytest.raises(InvalidRequestError, match="2 robots of port 1 lost .*--lerobot-port"):
            desk.find(A3)

    desk(scenario)


def test_robots_that_asked_for_the_same_may_take_each_others_place():
    async def scenario(desk):
        desk.begin(A)
        desk.clock.advance(1.0)
        latest = desk.begin(A2)
        desk.away()
        assert desk.find(A3) is latest

    desk(scenario)


def test_defect_a6_2_a_robot_of_another_machine_takes_over_nothing():
    async def scenario(desk):
        a = desk.begin(A)
        desk.away()
        with pytest.raises(InvalidRequestError, match="does not know this robot"):
            desk.find(FAR)
        assert desk.find(A) is a

    desk(scenario)


def test_defect_a6_2_a_robot_that_was_silent_keeps_its_session_when_another_begins():
    async def scenario(desk):
        a = desk.begin(A, pretrained_name_or_path="one")
        desk.away()
        other = desk.begin(A2, pretrained_name_or_path="other")
        desk.away()
        # Which of both comes back cannot be told.
        with pytest.raises(InvalidRequestError, match="2 robots"):
            desk.find(A3)
        with desk.sessions.calling(other):
            assert desk.find(A3) is a

    desk(scenario)


def test_a_client_that_was_started_anew_is_the_only_one_after_a_while():
    async def scenario(desk):
        desk.begin(A, pretrained_name_or_path="one")
        desk.away()
        second = desk.begin(A2, pretrained_name_or_path="other")
        with desk.sessions.calling(second):
            desk.clock.advance(FOLLOWED_S)
        desk.away()
        assert desk.find(A3) is second
        assert len(desk.sessions.all()) == 1

    desk(scenario)


def test_a_robot_whose_session_was_taken_over_though_it_was_there_gets_another():
    async def scenario(desk):
        a = desk.begin(A, policy_type="mine")
        desk.away()
        assert desk.find(A2) is a
        again = desk.find(A)
        assert again is not a
        assert again.instructions == a.instructions
        assert (desk.find(A), desk.find(A2)) == (again, a)

    desk(scenario)


def test_defect_a6_2_a_second_robot_on_the_connection_of_one_that_runs_is_refused():
    async def scenario(desk):
        caller = Caller(A, "port 1")
        session = desk.sessions.begin(caller)
        # Again before it said what it asks for: the same client.
        assert desk.sessions.begin(caller) is session
        with desk.sessions.instructing(caller):
            for beginning in (desk.sessions.begin, instruct(desk)):
                with pytest.raises(InvalidRequestError, match="--lerobot-port"):
                    beginning(caller)
        desk.clock.advance(LIVE_S - 0.1)
        for beginning in (desk.sessions.begin, instruct(desk)):
            with pytest.raises(InvalidRequestError, match="clients of one process"):
                beginning(caller)
        desk.clock.advance(0.1)
        assert desk.sessions.begin(caller) is session
        with desk.sessions.instructing(caller):
            pass
        with desk.sessions.calling(session):
            desk.clock.advance(LIVE_S)
            with pytest.raises(InvalidRequestError, match="share"):
                desk.sessions.begin(caller)
        # With an id of its own nobody else is meant.
        named = Caller(A, "port 1", "arm-7")
        first = desk.sessions.begin(named)
        with desk.sessions.instructing(named):
            assert desk.sessions.begin(named) is first

    desk(scenario)


def instruct(desk):
    def instructing(caller):
        with desk.sessions.instructing(caller):
            pass

    return instructing


def test_a_robot_that_is_silent_for_long_is_forgotten():
    async def scenario(desk):
        desk.begin(A)
        desk.clock.advance(SETTINGS.expiry_s + 1)
        desk.begin(B)
        assert len(desk.sessions.all()) == 1

    desk(scenario)


def test_robots_beyond_the_limit_are_refused():
    async def scenario(desk):
        for number in range(4):
            desk.begin(f"ipv4:10.0.1.{number}:1")
        with pytest.raises(InvalidRequestError, match="4 robots are connected"):
            desk.begin(A)

    desk(scenario)


def test_an_id_is_the_session_whatever_the_connection():
    async def scenario(desk):
        first = desk.sessions.begin(Caller(A, "port 1", "arm-7"))
        assert desk.sessions.find(Caller(B, "port 2", "arm-7")) is first
        with pytest.raises(InvalidRequestError):
            desk.sessions.find(Caller(A, "port 1", "arm-8"))
        with pytest.raises(InvalidRequestError):
            desk.find(A)

    desk(scenario)


def test_a_robot_goes_on_after_its_connection_broke():
    async def scenario():
        server = FakePolicyServer()
        async with port(server, settings=FAST) as gateway:
            async with gateway.robot() as robot:
                await robot.begin()
                await robot.send(timestep=1)
                assert await robot.acted()
            async with gateway.robot() as again:
                # LeRobot's client sends neither Ready nor its settings again.
                assert await again.get() == []
                await again.send(timestep=5)
                assert (await again.acted())[0].timestep == 5
            assert len(gateway.robots.robots()) == 1

    run(scenario())


def test_defect_a6_2_a_robot_that_comes_back_gets_nothing_of_before():
    """Two alike robots of one machine lose their connections; either may come back first."""

    async def scenario():
        server = FakePolicyServer()
        async with port(server, settings=FAST) as gateway:
            async with gateway.robot() as one, gateway.robot() as other:
                for robot in (one, other):
                    await robot.begin()
                    await robot.send(timestep=5)
                assert await one.acted()
                server.behave = server.hold
                asked = other.asked()
                await server.arrived(4)
                asked.cancel()
            server.release.set()
            async with gateway.robot() as again:
                for _ in range(3):
                    assert await again.get() == []
                # Nor is it left out for what was answered before.
                await again.send(timestep=6)
                assert (await again.acted())[0].timestep == 6
                assert len(seen(server)) == 3

    run(scenario())


def test_defect_a6_2_clients_that_share_a_connection_are_told_apart_or_refused():
    async def scenario():
        async with port(FakePolicyServer(), settings=FAST) as gateway, gateway.robot() as one:
            await one.begin()
            for beginning in (one.ready(), one.instruct()):
                error = await refused(beginning)
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert "clients of one process share it" in error.details()
            # The first one goes on.
            await one.send(timestep=5)
            assert (await one.acted())[0].timestep == 5

    run(scenario())


def test_defect_a6_2_two_clients_that_ask_for_one_robots_actions_get_none():
    async def scenario():
        async with port(FakePolicyServer()) as gateway, gateway.robot("arm") as robot:
            await robot.begin()
            waiting = robot.asked()
            for _ in range(NUM_OVERLAPS - 1):
                later = robot.asked()
                assert await waiting == b""
                waiting = later
            error = await refused(robot.asked())
            assert "two clients ask for this robot's actions at once" in error.details()
            await refused(robot.send())
            await robot.send()
            view = gateway.view()
            assert (view.num_observations, view.num_answered) == (0, 0)
            # Until one begins anew.
            await robot.begin()
            await robot.send()
            assert await robot.acted()

    run(scenario())


def test_robots_of_different_ports_never_mix():
    async def scenario():
        server = FakePolicyServer()
        async with port(server, settings=FAST, num_ports=2) as gateway:
            async with gateway.robot() as one, Robot(gateway.extra[0]) as other:
                await one.begin()
                await other.begin(lerobot_features=features(joints=1))
                await other.send({"j0.pos": 9.0})
                assert await one.get() == []
                assert await other.acted()
            async with Robot(gateway.extra[0]) as again:
                assert await again.get() == []
                await again.send({"j0.pos": 3.0}, timestep=9)
                assert await again.acted()
            assert seen(server)[-1].observation.state.tolist() == [3.0]

    run(scenario())


def test_an_id_carries_a_robot_over_to_another_connection():
    async def scenario():
        async with port(FakePolicyServer(), settings=FAST) as gateway:
            async with gateway.robot("arm-7") as robot:
                await robot.begin()
            async with gateway.robot("arm-7") as again, gateway.robot() as stranger:
                await again.send(SENSORS)
                assert await again.acted()
                error = await refused(stranger.send())
                assert "does not know this robot" in error.details()

    run(scenario())
