"""Which robot a call is from: connections, returns after a break, ports, and ids."""

from __future__ import annotations

import pytest

from phalanx.errors import InvalidRequestError
from phalanx.gateway.lerobot.caller import Caller
from phalanx.gateway.lerobot.session import Session
from phalanx.gateway.lerobot.sessions import AWAY_S, Sessions
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
        session.instructions = decode_policy_instructions(config(**changed))
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


A, B, A2, FAR = "ipv4:10.0.0.1:50", "ipv4:10.0.0.2:50", "ipv4:10.0.0.1:51", "ipv4:10.0.0.9:7"


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
        desk.begin(B, pretrained_name_or_path="other")
        desk.away()
        with pytest.raises(InvalidRequestError, match="2 robots of port 1 lost .*--lerobot-port"):
            desk.find(FAR)

    desk(scenario)


def test_robots_that_asked_for_the_same_may_take_each_others_place():
    async def scenario(desk):
        desk.begin(A)
        desk.clock.advance(1.0)
        latest = desk.begin(B)
        desk.away()
        assert desk.find(FAR) is latest

    desk(scenario)


def test_a_robot_that_begins_anew_leaves_no_session_behind():
    async def scenario(desk):
        desk.begin(A, pretrained_name_or_path="one")
        desk.away()
        second = desk.begin(A2, pretrained_name_or_path="other")
        desk.away()
        assert desk.find("ipv4:10.0.0.1:52") is second

    desk(scenario)


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
