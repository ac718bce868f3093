"""The gateway for LeRobot's asynchronous clients."""

from phalanx.gateway.lerobot.service import LeRobotService, RobotView
from phalanx.gateway.lerobot.settings import LeRobotSettings

__all__ = ["LeRobotService", "LeRobotSettings", "RobotView"]
