"""A robot for LeRobot that is not there: `--robot.type=fake_arm`."""

from lerobot_robot_fake.config_fake_arm import FakeArmConfig
from lerobot_robot_fake.fake_arm import FakeArm

__all__ = ["FakeArm", "FakeArmConfig"]
