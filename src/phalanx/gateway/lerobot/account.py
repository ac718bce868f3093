"""What one robot's observations came to."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from phalanx.gateway.traffic import Quantiles

NUM_LATEST = 512
_NUM_RATES = 8
_TOLERANCE = 0.2


class ControlRate:
    """How many actions a second a robot takes, by the times and steps of its observations."""

    def __init__(self, fps: float) -> None:
        self._fps = fps
        self._last: tuple[int, float] | None = None
        self._rates: deque[float] = deque(maxlen=_NUM_RATES)
        self._told = False

    @property
    def value(self) -> float | None:
        return median(self._rates) if self._rates else None

    def observe(self, timestep: int, timestamp_s: float) -> float | None:
        """The rate, once, when it is certain that it is another than the gateway's.

        A robot that waits is slower than its rate, so that only a faster one is certain.
        """
        last, self._last = self._last, (timestep, timestamp_s)
        if last is None or timestep <= last[0] or timestamp_s <= last[1]:
            return None
        self._rates.append((timestep - last[0]) / (timestamp_s - last[1]))
        rate = median(self._rates)
        if self._told or len(self._rates) < _NUM_RATES or rate < self._fps * (1 + _TOLERANCE):
            return None
        self._told = True
        return rate


class Account:
    """Counts, and the times from an observation's arrival to its answer.

    `num_replaced` made way for a newer one before anyone answered them, `num_outdated` were sent
    before the robot got the answer to an earlier one.
    """

    def __init__(self, fps: float) -> None:
        self.num_observations = 0
        self.num_replaced = 0
        self.num_outdated = 0
        self.num_failed = 0
        self.num_answered = 0
        self.rate = ControlRate(fps)
        self._latencies: deque[float] = deque(maxlen=NUM_LATEST)

    def answered(self, latency_s: float) -> None:
        self.num_answered += 1
        self._latencies.append(latency_s)

    def latency(self) -> Quantiles:
        ordered = sorted(self._latencies)
        return Quantiles(_of(ordered, 0.5), _of(ordered, 0.95), _of(ordered, 0.99))


def _of(ordered: list[float], quantile: float) -> float | None:
    if not ordered:
        return None
    return 1000 * ordered[min(math.ceil(quantile * len(ordered)), len(ordered)) - 1]
