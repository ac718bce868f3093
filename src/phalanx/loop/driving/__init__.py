"""How prepared steps are computed and planned: on threads beside the loop's own, or on it."""

from __future__ import annotations

from phalanx.loop.driving.base import StepDriver
from phalanx.loop.driving.in_turn import StepsInTurn
from phalanx.loop.driving.threads import StepThreads
from phalanx.step.engine import StepEngine


def create_driver(engine: StepEngine) -> StepDriver:
    """Threads where the device computes while they go on; else they would only take turns."""
    return StepThreads(engine) if engine.backend.asynchronous else StepsInTurn(engine)
