"""Robots go on after a restart of the gateway, which they are not told of."""

from __future__ import annotations

import logging

import pytest

from phalanx.errors import InvalidRequestError
from phalanx.gateway.lerobot.caller import Caller
from phalanx.gateway.lerobot.robots_file import RobotsFile, SavedRobot
from phalanx.gateway.lerobot.session import Session
from phalanx.gateway.lerobot.sessions import Sessions
from phalanx.gateway.lerobot.settings import LeRobotSettings
from phalanx.testing import ManualClock
from phalanx.wire.lerobot import decode_policy_instructions
from tests.gateway.lerobot.robots import Robot, refused
from tests.gateway.policy_servers import HOST, FakePolicyServer, run
from tests.gateway.whole import ProbedServer, ready, running
from tests.wire.lerobot.malicious import CORPUS
from tests.wire.lerobot.pickles import config

SETTINGS = LeRobotSettings()
CLOCK = ManualClock()


def sessions() -> Sessions:
    return Sessions(lambda name: Session(name, None, SETTINGS, CLOCK), SETTINGS, CLOCK)


def saved(**changed: object) -> SavedRobot:
    fields = {
        "address": "port 1",
        "host": "ipv4:10.0.0.1",
        "session_id": None,
        "seen_wall_s": CLOCK.wall_s(),
        "instructions": config(),
        **changed,
    }
    return SavedRobot(**fields)  # type: ignore[arg-type]


def on_a_loop(check) -> None:
    async def scenario():
        check()

    run(scenario())


def test_a_restored_robot_is_known_by_its_machine_and_address():
    def check():
        known = sessions()
        known.restore(saved())
        with pytest.raises(InvalidRequestError):
            known.find(Caller("ipv4:10.0.0.1:77", "port 2"))
        session = known.find(Caller("ipv4:10.0.0.1:77", "port 1"))
        assert session.instructions == decode_policy_instructions(config())

    on_a_loop(check)


def test_what_is_saved_is_what_is_restored():
    def check():
        first = sessions()
        session = first.begin(Caller("ipv4:10.0.0.1:50", "port 1", "arm-7"))
        assert first.saved() == []
        session.instruct(decode_policy_instructions(config()), config())
        second = sessions()
        (robot,) = first.saved()
        second.restore(robot)
        assert second.saved()[0].instructions == config()
        assert second.find(Caller("ipv4:10.0.0.2:1", "port 3", "arm-7")).instructions is not None

    on_a_loop(check)


def test_a_robot_of_long_ago_is_forgotten():
    def check():
        known = sessions()
        known.restore(saved(seen_wall_s=CLOCK.wall_s() - SETTINGS.expiry_s - 1))
        assert known.all() == []

    on_a_loop(check)


def test_a_file_that_is_not_one_is_logged(tmp_path, caplog):
    path = tmp_path / "robots"
    path.write_text("{")
    with caplog.at_level(logging.WARNING):
        assert RobotsFile(path).load() == []
    assert "cannot be read" in caplog.text
    assert RobotsFile(tmp_path / "none").load() == []
    RobotsFile(tmp_path / "no" / "folder").save([])
    assert "cannot be written" in caplog.text


def test_a_robot_goes_on_after_a_restart_of_the_gateway(tmp_path):
    async def scenario():
        server = ProbedServer()
        options = {"lerobot": True, "state_file": tmp_path / "state"}
        async with running(server, **options) as gateway:
            await ready(gateway, 1)
            port = gateway.grpc_port
            async with Robot(f"{HOST}:{port}") as robot:
                await robot.begin()
        again = ProbedServer()
        options["grpc_address"] = f"{HOST}:{port}"
        async with running(again, **options) as gateway, Robot(f"{HOST}:{port}") as robot:
            await ready(gateway, 1)
            await robot.send(timestep=9)
            assert (await robot.acted())[0].timestep == 9

    run(scenario())


def test_a_robot_whose_settings_cannot_be_read_is_left_out(tmp_path, caplog):
    async def scenario():
        robots = RobotsFile(tmp_path / "state.robots")
        robots.save([saved(instructions=CORPUS["os_system_4"])])
        options = {"lerobot": True, "state_file": tmp_path / "state"}
        async with running(FakePolicyServer(), **options) as gateway:
            async with Robot(f"{HOST}:{gateway.grpc_port}") as robot:
                assert "restart the robot's client" in (await refused(robot.send())).details()

    run(scenario())
    assert "not known any more" in caplog.text
