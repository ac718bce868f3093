"""Rollouts for reinforcement learning: Euler steps that are drawn from a Gaussian around them, with
what is needed to compute their probability again.

With the velocity v of x at time t, and a step of -d: the ends of the straight path through x are
x0 = x - v t and x1 = x + v (1 - t). The step has mean x0 (1 - (t - d)) + x1 ((t - d) - s^2 d / 2t) and
standard deviation s sqrt(d). So s = 0 is the Euler step itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.errors import InvalidRequestError
from phalanx.models.pi.request import MAX_STEPS, PiRequest, check_pi_request, check_tensor
from phalanx.schema.limits import Limits

VALUE = "value"
"""In `Limits.row_shapes` of a policy that has a value head."""


@dataclass(frozen=True, eq=False)
class RowRollout:
    """How one row's steps are drawn: `noise` [steps, chunk, size], and a deviation for each step."""

    noise: Tensor
    sigmas: tuple[float, ...]
    with_values: bool


@dataclass(frozen=True, eq=False)
class Draw:
    """How one step of a row is drawn: `noise` [chunk, size]."""

    noise: Tensor
    sigma: float
    valued: bool


@dataclass(frozen=True, eq=False)
class RowOutcome:
    """What one row of a rollout came to: `chain` [steps + 1, chunk, size], from noise to actions;
    `log_probs` [steps, chunk, size]; `values` [steps] or [1], None where there are none.
    """

    chain: Tensor
    log_probs: Tensor
    values: Tensor | None


@dataclass(frozen=True, eq=False)
class PI05RolloutOutput:
    """All float32: `actions` (B, chunk, size); `chains` (B, steps + 1, chunk, size), from noise to
    actions; `transition_logprobs` (B, steps, chunk, size) of each number of each step, 0 where the
    step was not drawn; `raw_values` (B, steps), or (B, 1) of a head on the prefix, or None.
    """

    actions: Tensor
    chains: Tensor
    transition_logprobs: Tensor
    raw_values: Tensor | None


def drawn_step(x: Tensor, v: Tensor, numbers: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The next x [R, chunk, size] and the log-probability of each of its numbers.

    `numbers` [3, R, 1, 1]: time, length of the step (above 0) and deviation, each float32.
    """
    time, length, sigma = numbers
    towards_noise = x + v * (1.0 - time)
    mean = x - length * v - towards_noise * (sigma**2 * length / (2.0 * time))
    std = sigma * length.sqrt()
    drawn = mean + noise * std
    is_drawn = std > 0.0
    safe = torch.where(is_drawn, std, 1.0)
    density = -0.5 * ((drawn - mean) / safe) ** 2 - safe.log() - 0.5 * math.log(2.0 * math.pi)
    return drawn, torch.where(is_drawn, density, 0.0)


def gathered(rows: list[RowOutcome]) -> PI05RolloutOutput:
    """The rows of a request as its output."""
    chains = torch.stack([row.chain for row in rows])
    values = [row.values for row in rows if row.values is not None]
    return PI05RolloutOutput(
        actions=chains[:, -1].clone(),
        chains=chains,
        transition_logprobs=torch.stack([row.log_probs for row in rows]),
        raw_values=torch.stack(values) if values else None,
    )


def check_rollout_request(
    request: PiRequest,
    sigmas: Tensor,
    step_noise: Tensor | None,
    limits: Limits,
    *,
    compute_values: bool,
) -> None:
    """Refuse what can never be computed, naming the field."""
    if not isinstance(sigmas, Tensor) or sigmas.dim() != 2 or not 1 <= sigmas.shape[1] <= MAX_STEPS:
        raise InvalidRequestError(
            f"sigmas must be a float tensor (B, steps) with 1 to {MAX_STEPS} steps", field="sigmas"
        )
    check_pi_request(request, limits)
    rows, steps = len(request.input_ids), sigmas.shape[1]
    if request.num_steps not in (None, steps):
        raise InvalidRequestError(
            f"num_steps={request.num_steps} beside sigmas for {steps} steps; leave num_steps out",
            field="num_steps",
        )
    check_tensor(sigmas, "sigmas", (rows, steps), "a float", floating=True)
    if bool((sigmas < 0).any()):
        raise InvalidRequestError(
            f"sigmas has {float(sigmas.min())}; a standard deviation is at least 0", field="sigmas"
        )
    shapes = limits.row_shapes
    assert shapes is not None
    if step_noise is not None:
        wanted = (rows, steps, *shapes["noise"])
        check_tensor(step_noise, "step_noise", wanted, "a float", floating=True)
    if request.rtc is not None:
        raise InvalidRequestError(
            "rtc binds actions to an old chunk, whose probability is not theirs; leave it out of a "
            "rollout",
            field="rtc",
        )
    if compute_values and VALUE not in shapes:
        raise InvalidRequestError(
            "compute_values needs a value head; build the engine with "
            "PI05Args(config=PI05Config(add_value_head=True))",
            field="compute_values",
        )
