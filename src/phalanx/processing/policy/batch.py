"""Adds the dimension of rows to an observation that is of one moment."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from phalanx.processing.policy.step import SettingsStep
from phalanx.processing.policy.transition import IMAGE_PREFIX, Transition

NAME = "to_batch_processor"
IMAGE = "observation.image"
VECTORS = ("observation.state", "observation.environment_state")


class BatchSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """It has none."""


@dataclass(frozen=True)
class AddBatch(SettingsStep[BatchSettings]):
    """Vectors and images that have it already stay as they are."""

    name = NAME
    settings_cls = BatchSettings

    def __call__(self, transition: Transition) -> Transition:
        observation = {
            name: value.unsqueeze(0) if value.ndim == _ndim_of_one(name) else value
            for name, value in transition.observation.items()
        }
        actions = transition.actions
        if actions is not None and actions.ndim == 1:
            actions = actions.unsqueeze(0)
        return replace(transition, observation=observation, actions=actions)


def _ndim_of_one(name: str) -> int | None:
    """How many dimensions a value of one moment has; None where it never gets another."""
    if name in VECTORS:
        return 1
    return 3 if name == IMAGE or name.startswith(IMAGE_PREFIX) else None
