"""The formulas between a robot's units and a policy's, as LeRobot has them.

Each is exact to the bit in float32: the order of the operations is part of the contract.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import torch
from torch import Tensor

Statistics = Mapping[str, Tensor]
"""Of one feature: `mean`, `std`, `min`, `max`, `q01`, `q99`, `q10`, `q90`."""


class NormalizationMode(StrEnum):
    IDENTITY = "IDENTITY"
    MEAN_STD = "MEAN_STD"
    MIN_MAX = "MIN_MAX"
    QUANTILES = "QUANTILES"
    QUANTILE10 = "QUANTILE10"

    @property
    def statistics(self) -> tuple[str, ...]:
        """The names of what it needs: of an offset and a scale, or of two ends."""
        return _NEEDED[self]


_NEEDED: dict[NormalizationMode, tuple[str, ...]] = {
    NormalizationMode.IDENTITY: (),
    NormalizationMode.MEAN_STD: ("mean", "std"),
    NormalizationMode.MIN_MAX: ("min", "max"),
    NormalizationMode.QUANTILES: ("q01", "q99"),
    NormalizationMode.QUANTILE10: ("q10", "q90"),
}


def normalize(
    mode: NormalizationMode, values: Tensor, statistics: Statistics, eps: float
) -> Tensor:
    """`(x - mean) / (std + eps)`, or `2 (x - low) / (high - low) - 1`; nothing is clipped."""
    if mode is NormalizationMode.IDENTITY:
        return values
    first, second = _pair(mode, values, statistics)
    if mode is NormalizationMode.MEAN_STD:
        return (values - first) / (second + eps)
    return 2.0 * (values - first) / _width(first, second, eps) - 1.0


def unnormalize(
    mode: NormalizationMode, values: Tensor, statistics: Statistics, eps: float
) -> Tensor:
    """The inverse; of mean and std without the `eps` that `normalize` adds."""
    if mode is NormalizationMode.IDENTITY:
        return values
    first, second = _pair(mode, values, statistics)
    if mode is NormalizationMode.MEAN_STD:
        return values * second + first
    width = _width(first, second, eps)
    if mode is NormalizationMode.MIN_MAX:
        return (values + 1) / 2 * width + first
    return (values + 1.0) * width / 2.0 + first


def _pair(mode: NormalizationMode, values: Tensor, statistics: Statistics) -> tuple[Tensor, Tensor]:
    first, second = (statistics[name].to(values) for name in mode.statistics)
    return first, second


def _width(low: Tensor, high: Tensor, eps: float) -> Tensor:
    """`high - low`; `eps` where they are equal, so that `low` becomes -1."""
    width = high - low
    return torch.where(width == 0, torch.full_like(width, eps), width)
