"""What a policy's actions must be before they go to a robot."""

from __future__ import annotations

import numpy as np

from phalanx.schema.observation import Actions, Observation
from phalanx.server.policy.failures import AnswerMismatchError, PolicyFailedError


def check_actions(actions: Actions, observation: Observation) -> None:
    """Raise `AnswerMismatchError` for the actions of another observation than this one, and
    `PolicyFailedError` for numbers that no robot may be sent."""
    values = actions.values
    rows = observation.num_rows
    fits = values.ndim == 3 and len(values) == rows if observation.batched else values.ndim == 2
    if not fits or values.dtype != np.float32:
        wanted = (
            f"({rows}, horizon, action_dim)" if observation.batched else "(horizon, action_dim)"
        )
        raise AnswerMismatchError(
            f"the policy answered {values.dtype} of shape {values.shape}; float32 of shape {wanted} "
            "would answer this observation"
        )
    horizon = observation.horizon
    if horizon is not None and values.shape[-2] > horizon:
        raise AnswerMismatchError(
            f"the policy answered {values.shape[-2]} actions where {horizon} were asked for"
        )
    if not np.isfinite(values).all():
        row = np.argwhere(~np.isfinite(values))[0]
        raise PolicyFailedError(
            f"the policy's actions are not finite: {values[tuple(row)]} at index "
            f"{tuple(int(index) for index in row)}; they were not sent"
        )
