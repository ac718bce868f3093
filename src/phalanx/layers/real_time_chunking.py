"""Real-time chunking: a new chunk of actions is drawn towards what is left of the one before it.

Black et al. 2025. With LeRobot's conventions: time runs from 1 (noise) to 0, and the Jacobian of the
guidance is the identity. Schedules have LeRobot's names.
"""

from __future__ import annotations

import enum
import math

import torch
from torch import Tensor


class Schedule(enum.Enum):
    """How strongly actions are bound to the old chunk, between those that are executed before the
    new one can be (weight 1) and the execution horizon (0 from there on).
    """

    ZEROS = "ZEROS"
    ONES = "ONES"
    LINEAR = "LINEAR"
    EXP = "EXP"


def prefix_weights(schedule: Schedule, delay: int, horizon: int, chunk: int) -> Tensor:
    """float32 [chunk]: the first `delay` actions have weight 1, those from `horizon` on 0."""
    horizon = min(horizon, chunk)
    delay = min(delay, horizon)
    weights = torch.zeros(chunk)
    weights[:delay] = 1.0
    between = horizon - delay
    match schedule:
        case Schedule.ZEROS:
            pass
        case Schedule.ONES:
            weights[delay:horizon] = 1.0
        case Schedule.LINEAR:
            weights[delay:horizon] = torch.linspace(1.0, 0.0, between + 2)[1:-1]
        case Schedule.EXP:
            falling = torch.linspace(1.0, 0.0, between + 2)[1:-1]
            weights[delay:horizon] = falling * torch.expm1(falling) / (math.e - 1)
    return weights


def guidance_weight(time: float, most: float) -> float:
    """How strongly a step at `time` is guided, at most `most`."""
    done = 1.0 - time
    if done <= 0.0 or time <= 0.0:
        return most
    return min(time / done * (time**2 + done**2) / time**2, most)
