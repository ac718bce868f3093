"""A step that is not known here, and does nothing, since its file disables it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from phalanx.processing.policy.step import StepRecord
from phalanx.processing.policy.transition import Transition


@dataclass(frozen=True, eq=False)
class DisabledStep:
    """Kept to be written as it was read."""

    record: StepRecord

    @property
    def registry_name(self) -> str:
        return self.record.registry_name

    @property
    def config(self) -> dict[str, object]:
        return self.record.config

    @property
    def state(self) -> Mapping[str, Tensor]:
        return self.record.state

    def __call__(self, transition: Transition) -> Transition:
        return transition
