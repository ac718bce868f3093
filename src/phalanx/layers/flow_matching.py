"""Flow matching from noise (time 1) to data (time 0), in equal Euler steps (Lipman et al. 2023).

Times are computed in Python's doubles and then rounded to float32, so that many steps accumulate no
error; so are the embeddings of times.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def flow_time(step: int, num_steps: int) -> float:
    """The time at which step `step` of `num_steps` begins, as it is after rounding to float32."""
    return float(np.float32(1.0 + step * flow_advance(num_steps)))


def flow_advance(num_steps: int) -> float:
    """What each of `num_steps` steps adds to the time."""
    return -1.0 / num_steps


def time_embedding(time: float, width: int, min_period: float, max_period: float) -> Tensor:
    """Sines, then cosines, of `time` at `width / 2` periods: float32 [width], computed in float64.

    Periods go from the least to the largest in equal ratios.
    """
    fraction = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64)
    period = min_period * (max_period / min_period) ** fraction
    angle = (1.0 / period * 2 * math.pi) * time
    return torch.cat((angle.sin(), angle.cos())).float()
