"""The gateway for LeRobot's asynchronous clients."""

from phalanx.gateway.lerobot.door import LeRobotDoor
from phalanx.gateway.lerobot.named_front import Listener
from phalanx.gateway.lerobot.robots_file import RobotsFile
from phalanx.gateway.lerobot.service import LeRobotService, RobotView
from phalanx.gateway.lerobot.settings import LeRobotSettings

__all__ = [
    "LeRobotDoor",
    "LeRobotService",
    "LeRobotSettings",
    "Listener",
    "RobotView",
    "RobotsFile",
]
