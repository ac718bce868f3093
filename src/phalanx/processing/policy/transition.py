"""What flows through a policy's processing steps; no step changes it, each returns another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

STATE = "observation.state"
IMAGE_PREFIX = "observation.images."
TOKENS = "observation.language.tokens"
TOKEN_MASK = "observation.language.attention_mask"
ACTION = "action"


@dataclass(frozen=True, eq=False)
class Transition:
    """`observation`: tensors by LeRobot's names; images (B, C, H, W) float in [0, 1], state (B, S).

    `tasks`: one text a row. `actions`: (B, horizon, action_dim), after the policy only.
    `reference_state`: the state in the robot's units that relative actions are relative to.
    """

    observation: Mapping[str, Tensor] = field(default_factory=dict)
    tasks: tuple[str, ...] = ()
    actions: Tensor | None = None
    reference_state: Tensor | None = None

    def with_observation(self, changed: Mapping[str, Tensor]) -> Transition:
        """The same with these tensors added or replaced."""
        return replace(self, observation={**self.observation, **changed})
