"""Joints that go half of the way to where they are sent, and cameras that see a moving pattern."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
from lerobot.robots.robot import Robot

from lerobot_robot_fake.config_fake_arm import FakeArmConfig


class FakeArm(Robot):
    config_class = FakeArmConfig
    name = "fake_arm"

    def __init__(self, config: FakeArmConfig) -> None:
        super().__init__(config)
        self.config = config
        self._connected = False
        self._num_moves = 0
        self._positions = dict.fromkeys(self._joints, 0.0)

    @property
    def _joints(self) -> list[str]:
        return [f"joint_{index}.pos" for index in range(self.config.num_joints)]

    @property
    def observation_features(self) -> dict[str, Any]:
        shape = (self.config.height, self.config.width, 3)
        return {
            **dict.fromkeys(self._joints, float),
            **dict.fromkeys(self.config.camera_names, shape),
        }

    @property
    def action_features(self) -> dict[str, type]:
        return dict.fromkeys(self._joints[: self.config.num_actions], float)

    @property
    def is_connected(self) -> bool:
        return self._connected

    @property
    def is_calibrated(self) -> bool:
        return True

    def connect(self, calibrate: bool = True) -> None:
        self._connected = True
        self._report("connected")

    def calibrate(self) -> None:
        pass

    def configure(self) -> None:
        pass

    def get_observation(self) -> dict[str, Any]:
        self._report("observed")
        images = {name: self._image(number) for number, name in enumerate(self.config.camera_names)}
        return {**self._positions, **images}

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        for joint, target in action.items():
            self._positions[joint] += (float(target) - self._positions[joint]) / 2
        self._num_moves += 1
        self._report("moved")
        return action

    def disconnect(self) -> None:
        self._connected = False
        self._report("disconnected")

    def _image(self, number: int) -> np.ndarray:
        image = np.empty((self.config.height, self.config.width, 3), np.uint8)
        rows = np.arange(self.config.height, dtype=np.uint32)[:, None, None]
        columns = np.arange(self.config.width, dtype=np.uint32)[None, :, None]
        colours = np.array([1, 2, 3], np.uint32)
        image[:] = (rows + columns * colours + 5 * self._num_moves + 60 * number) % 256
        return image

    def _report(self, event: str) -> None:
        """`at_s` is of a clock that all processes of this machine share."""
        if self.config.report:
            line = {"event": event, "at_s": time.monotonic(), "num_moves": self._num_moves}
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
