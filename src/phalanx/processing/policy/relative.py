"""Actions that a policy gives relative to the state: turned into the robot's own afterwards.

The two steps are stored in two files and belong together: what is relative is said by the one of
the pre-processor, and the post-processor's adds the state of the same observation again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import msgspec
import torch
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.processing.policy.step import SettingsStep, StepRecord, Surroundings
from phalanx.processing.policy.transition import STATE, Transition

RELATIVE = "relative_actions_processor"
ABSOLUTE = "absolute_actions_processor"


class RelativeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`exclude_joints`: parts of action names that stay absolute, if `action_names` are known."""

    enabled: bool = False
    exclude_joints: list[str] = []
    action_names: list[str] | None = None


class AbsoluteSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    enabled: bool = False


@dataclass(frozen=True)
class RelativeActions(SettingsStep[RelativeSettings]):
    """Before the policy; actions are there in training only, so here it notes the state alone."""

    name = RELATIVE
    settings_cls = RelativeSettings

    def __call__(self, transition: Transition) -> Transition:
        state = transition.observation.get(STATE)
        if state is None:
            return transition
        actions = transition.actions
        if self.settings.enabled and actions is not None:
            actions = actions - self.offset(state, actions)
        return replace(transition, actions=actions, reference_state=state)

    def offset(self, state: Tensor, actions: Tensor) -> Tensor:
        """What is added to relative `actions`: the state where they are relative, else 0."""
        dims = actions.shape[-1]
        if state.shape[-1] < dims:
            raise CheckpointError(
                f"actions of {dims} numbers are relative to a state of {state.shape[-1]}; the "
                "state needs a number for each"
            )
        relative = torch.tensor(self._relative(dims), dtype=actions.dtype, device=actions.device)
        offset = state[..., :dims].to(actions) * relative
        return offset.unsqueeze(-2) if actions.ndim == 3 else offset

    def _relative(self, dims: int) -> Sequence[bool]:
        excluded = [name.lower() for name in self.settings.exclude_joints if name]
        names = [name.lower() for name in self.settings.action_names or ()][:dims]
        known = [not any(part in name for part in excluded) for name in names]
        return known + [True] * (dims - len(known))


@dataclass(frozen=True)
class AbsoluteActions(SettingsStep[AbsoluteSettings]):
    """After the policy."""

    name = ABSOLUTE
    settings_cls = AbsoluteSettings

    relative: RelativeActions | None

    @classmethod
    def read(cls, record: StepRecord, surroundings: Surroundings) -> Self:
        settings = record.settings(AbsoluteSettings)
        found = [step for step in surroundings.before if isinstance(step, RelativeActions)]
        if settings.enabled and not found:
            raise CheckpointError(
                f"{record.where} ({ABSOLUTE}) is enabled, but the pre-processor has no {RELATIVE} "
                "that says which actions are relative; add it to policy_preprocessor.json"
            )
        return cls(settings, found[0] if found else None)

    def __call__(self, transition: Transition) -> Transition:
        actions, state = transition.actions, transition.reference_state
        if not self.settings.enabled or actions is None:
            return transition
        assert self.relative is not None
        if state is None:
            raise CheckpointError(
                f"{ABSOLUTE} needs the state that the actions are relative to, and there is none"
            )
        return replace(transition, actions=actions + self.relative.offset(state, actions))
