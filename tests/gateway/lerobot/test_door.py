"""LeRobot's clients at a whole gateway: its own port, further ones, and what it reports of robots."""

from __future__ import annotations

import time

import pytest

from phalanx.gateway.config import LeRobotPort
from tests.gateway.lerobot.robots import Robot, refused
from tests.gateway.policy_servers import HOST, run
from tests.gateway.whole import ProbedServer, asked, ready, running

TWO_PORTS = (LeRobotPort(0), LeRobotPort(0))


def test_robots_at_each_port_of_a_gateway():
    async def scenario():
        async with running(ProbedServer(), lerobot=True, lerobot_ports=TWO_PORTS) as gateway:
            await ready(gateway, 1)
            door = gateway._robots
            ports = (gateway.grpc_port, *door.ports)
            assert len(set(ports)) == 3
            assert all(f"LeRobot at {HOST}:{port}" in gateway.announcement for port in door.ports)
            for port in ports:
                async with Robot(f"{HOST}:{port}") as robot:
                    await robot.begin()
                    await robot.send(timestep=3)
                    assert (await robot.acted())[0].timestep == 3
            report = await asked(gateway, "GET", "/v1/robots")
            assert [robot["model"] for robot in report["robots"]] == ["pi05"] * 3
            assert [robot["num_answered"] for robot in report["robots"]] == [1, 1, 1]
            assert all(robot["latency_ms"]["p50"] > 0 for robot in report["robots"])

    run(scenario())


def test_defect_a6_2_the_same_name_at_another_port_is_another_robot():
    """As with a proxy in between, which says the same name for both."""

    async def scenario():
        async with running(ProbedServer(), lerobot=True, lerobot_ports=TWO_PORTS) as gateway:
            await ready(gateway, 1)
            for port in gateway._robots.ports:
                async with Robot(f"{HOST}:{port}", authority="Proxy:8080") as robot:
                    await robot.begin()
            report = await asked(gateway, "GET", "/v1/robots")
            assert [robot["name"].partition(" at ")[2] for robot in report["robots"]] == [
                f"proxy:8080 (port {port})" for port in gateway._robots.ports
            ]

    run(scenario())


def test_each_port_has_its_own_rate():
    async def scenario():
        ports = (LeRobotPort(0), LeRobotPort(0, 15.0), LeRobotPort(0, 50.0))
        async with running(
            ProbedServer(), lerobot=True, lerobot_fps=25.0, lerobot_ports=ports
        ) as gateway:
            await ready(gateway, 1)
            spaces_s = []
            for port in (gateway.grpc_port, *gateway._robots.ports):
                async with Robot(f"{HOST}:{port}") as robot:
                    await robot.begin()
                    await robot.send(timestamp=time.time())
                    first, second, *_ = await robot.acted()
                    spaces_s.append(second.timestamp_s - first.timestamp_s)
            assert spaces_s == pytest.approx([1 / 25, 1 / 25, 1 / 15, 1 / 50], abs=1e-5)

    run(scenario())


def test_without_the_flag_there_is_no_such_service():
    async def scenario():
        async with (
            running(ProbedServer()) as gateway,
            Robot(f"{HOST}:{gateway.grpc_port}") as robot,
        ):
            error = await refused(robot.ready())
            assert error.code().name == "UNIMPLEMENTED"

    run(scenario())
