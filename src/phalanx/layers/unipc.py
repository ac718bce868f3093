"""UniPC, a predictor and corrector of order 2 for rectified flows, and the schedules it walks.

A sample at noise level sigma is (1 - sigma) data + sigma noise, and a velocity is noise - data. The
solver is the variant bh2 that predicts data (Zhao et al. 2023, in the form of diffusers' multistep
scheduler). Schedules are computed in float64 on the host, and so are a step's few coefficients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.errors import ConfigurationError

_RHO = 7.0
_SHIFTED_END = 0.001
"""Where a shifted schedule would end, before its last sigma of 0."""

_SUPPORTED = {
    "use_flow_sigmas": True,
    "prediction_type": "flow_prediction",
    "predict_x0": True,
    "solver_order": 2,
    "solver_type": "bh2",
    "final_sigmas_type": "zero",
    "lower_order_final": True,
    "thresholding": False,
    "disable_corrector": [],
    "use_beta_sigmas": False,
    "use_exponential_sigmas": False,
    "use_dynamic_shifting": False,
    "shift_terminal": None,
}
"""What a scheduler's file must say where it says anything of these."""


@dataclass(frozen=True)
class SchedulerConfig:
    """What of `scheduler_config.json` decides the noise levels.

    `use_karras_sigmas`: from `sigma_max` to `sigma_min`, which are ratios of noise to data, by
    Karras et al. (2022), without a shift. Otherwise levels are equally spaced and then shifted;
    `native`: from a little less than 1, which a pipeline's file says and not the scheduler's.
    """

    num_train_timesteps: int = 1000
    use_karras_sigmas: bool = True
    sigma_min: float = 0.147
    sigma_max: float = 200.0
    flow_shift: float = 1.0
    native: bool = False

    def __post_init__(self) -> None:
        if self.num_train_timesteps < 1 or not 0 < self.sigma_min <= self.sigma_max:
            raise ConfigurationError(
                f"a scheduler with num_train_timesteps={self.num_train_timesteps}, sigma_min="
                f"{self.sigma_min}, sigma_max={self.sigma_max}; they must be positive, and "
                "sigma_min not above sigma_max"
            )
        if not (math.isfinite(self.flow_shift) and self.flow_shift > 0):
            raise ConfigurationError(f"flow_shift={self.flow_shift} must be a positive number")

    @classmethod
    def from_json(cls, stored: Mapping[str, Any], *, native: bool = False) -> Self:
        """From diffusers' file; unknown keys are ignored, another solver is refused by name."""
        for name, wanted in _SUPPORTED.items():
            value = stored.get(name, wanted)
            if value != wanted:
                raise ConfigurationError(
                    f"the scheduler has {name}={value!r}; only {wanted!r} is supported"
                )
        default = cls()
        karras = bool(stored.get("use_karras_sigmas", False))
        for name in ("sigma_min", "sigma_max") if karras else ():
            if stored.get(name) is None:
                raise ConfigurationError(f"the scheduler has use_karras_sigmas and no {name}")
        return cls(
            int(stored.get("num_train_timesteps", default.num_train_timesteps)),
            karras,
            _number(stored, "sigma_min", default.sigma_min),
            _number(stored, "sigma_max", default.sigma_max),
            _number(stored, "flow_shift", default.flow_shift),
            native,
        )


@dataclass(frozen=True, eq=False)
class FlowSchedule:
    """The levels that a flow goes through, on the host: `sigmas` float32 [N + 1], of which the last
    is 0, and what the network is told of each step, `timesteps` int64 [N].
    """

    sigmas: Tensor
    timesteps: Tensor

    @property
    def num_steps(self) -> int:
        return len(self.timesteps)

    @classmethod
    def karras(cls, config: SchedulerConfig, num_steps: int) -> Self:
        """Ratios of noise to data whose 7th roots are equally spaced."""
        low, high = config.sigma_min ** (1 / _RHO), config.sigma_max ** (1 / _RHO)
        ratios = (high + np.linspace(0, 1, num_steps) * (low - high)) ** _RHO
        return cls._of(ratios / (ratios + 1), config)

    @classmethod
    def shifted(cls, config: SchedulerConfig, num_steps: int) -> Self:
        """Equally spaced from 1 on, and shifted to more noise."""
        sigmas = _shifted(np.linspace(1, _SHIFTED_END, num_steps + 1)[:-1], config.flow_shift)
        if abs(sigmas[0] - 1) < 1e-6:
            sigmas[0] -= 1e-6  # at 1 nothing of the data would be left to take a logarithm of
        return cls._of(sigmas, config)

    @classmethod
    def native(cls, config: SchedulerConfig, num_steps: int) -> Self:
        """As `shifted`, from a little less than 1 on down to 0."""
        first = 1 - 1 / config.num_train_timesteps
        sigmas = _shifted(np.linspace(first, 0, num_steps + 1)[:-1], config.flow_shift)
        return cls._of(sigmas, config)

    @classmethod
    def of(cls, config: SchedulerConfig, num_steps: int) -> Self:
        """The schedule that a checkpoint asks for."""
        if config.use_karras_sigmas:
            return cls.karras(config, num_steps)
        return (cls.native if config.native else cls.shifted)(config, num_steps)

    @classmethod
    def _of(cls, sigmas: NDArray[np.float64], config: SchedulerConfig) -> Self:
        timesteps = (sigmas * config.num_train_timesteps).astype(np.int64)
        levels = np.concatenate((sigmas, [0.0])).astype(np.float32)
        return cls(torch.from_numpy(levels), torch.from_numpy(timesteps))


@dataclass(frozen=True, eq=False)
class UniPCState:
    """What a solver remembers of one sample: where its newest step began, corrected, the data that
    were predicted there and one step earlier, and the order of that step; all None before any.
    """

    begun: Tensor | None = None
    data: Tensor | None = None
    earlier: Tensor | None = None
    order: int = 1


class UniPCSolver:
    """See the module. Keeps nothing of a sample; each modality has a state of its own."""

    def __init__(self, schedule: FlowSchedule) -> None:
        self._sigmas: list[float] = schedule.sigmas.tolist()
        self._num_steps = schedule.num_steps

    def order(self, at: int) -> int:
        """Of the step from level `at`: the first and the last are of order 1."""
        return min(2, self._num_steps - at, at + 1)

    def step(
        self, state: UniPCState, at: int, velocity: Tensor, sample: Tensor
    ) -> tuple[Tensor, UniPCState]:
        """The sample at the next level, from float32 `velocity` and `sample` at level `at`."""
        data = sample - self._sigmas[at] * velocity
        if state.begun is not None:
            sample = self._corrected(state, at, data)
        after = UniPCState(sample, data, state.data, self.order(at))
        return self._predicted(after, at), after

    def _predicted(self, state: UniPCState, at: int) -> Tensor:
        sample, data = state.begun, state.data
        assert sample is not None
        assert data is not None
        if self._sigmas[at + 1] == 0.0:
            return data
        ratio, alpha, h = self._advance(at)
        growth = alpha * math.expm1(-h)
        ahead = ratio * sample - growth * data
        if state.order == 2:
            assert state.earlier is not None
            r = (self._log_ratio(at - 1) - self._log_ratio(at)) / h
            ahead = ahead - growth * (0.5 / r) * (state.earlier - data)
        return ahead

    def _corrected(self, state: UniPCState, at: int, data: Tensor) -> Tensor:
        """The sample that the step to level `at` should have come to, now that `data` is known."""
        assert state.begun is not None
        assert state.data is not None
        ratio, alpha, h = self._advance(at - 1)
        shrink = math.expm1(-h)
        change = data - state.data
        if state.order == 1:
            correction = 0.5 * change
        else:
            assert state.earlier is not None
            r = (self._log_ratio(at - 2) - self._log_ratio(at - 1)) / h
            first = shrink / -h - 1
            second = first / -h - 0.5
            b1, b2 = first / shrink, 2 * second / shrink
            rho = (b1 - b2) / (1 - r)
            correction = (rho / r) * (state.earlier - state.data) + (b1 - rho) * change
        growth = alpha * shrink
        return ratio * state.begun - growth * state.data - growth * correction

    def _advance(self, at: int) -> tuple[float, float, float]:
        """From level `at` to the next: the ratio of sigmas, the next share of data, and the step in
        the logarithm of data to noise.
        """
        here, after = self._sigmas[at], self._sigmas[at + 1]
        return after / here, 1 - after, self._log_ratio(at + 1) - self._log_ratio(at)

    def _log_ratio(self, at: int) -> float:
        sigma = self._sigmas[at]
        return math.log(1 - sigma) - math.log(sigma)


def _shifted(levels: NDArray[np.float64], shift: float) -> NDArray[np.float64]:
    return shift * levels / (1 + (shift - 1) * levels)


def _number(stored: Mapping[str, Any], name: str, default: float) -> float:
    value = stored.get(name)
    return default if value is None else float(value)
