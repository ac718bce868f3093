"""The services of `robot.inference.v1` and the paths of their methods."""

from __future__ import annotations

MODEL_INFERENCE = "robot.inference.v1.ModelInference"
MODEL_REGISTRY = "robot.inference.v1.ModelRegistry"
ROBOT_INFERENCE = "robot.inference.v1.RobotInference"

INFER = f"/{MODEL_INFERENCE}/Infer"
CHECK_HEALTH = f"/{MODEL_INFERENCE}/CheckHealth"
REGISTER = f"/{MODEL_REGISTRY}/Register"
HEARTBEAT = f"/{MODEL_REGISTRY}/Heartbeat"
COMMUNICATE = f"/{ROBOT_INFERENCE}/Communicate"

NOT_STARTED = "phalanx-not-started"
"""Trailing metadata of a refusal, of the value "1": the request never started."""
