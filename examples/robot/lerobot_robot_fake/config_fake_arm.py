"""What can be set of the fake arm."""

from __future__ import annotations

from dataclasses import dataclass, field

from lerobot.robots.config import RobotConfig


@RobotConfig.register_subclass("fake_arm")
@dataclass(kw_only=True)
class FakeArmConfig(RobotConfig):
    """`height` x `width` images of each camera; `num_joints` are measured, of which the first
    `num_actions` are moved. `report` writes a line of JSON to stdout for everything that happens.
    """

    camera_names: list[str] = field(default_factory=lambda: ["front", "wrist"])
    height: int = 480
    width: int = 640
    num_joints: int = 8
    num_actions: int = 7
    report: bool = True
