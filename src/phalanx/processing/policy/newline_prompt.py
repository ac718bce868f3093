"""pi0's prompt: the task, ended with a newline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec
from torch import Tensor

from phalanx.processing.policy.step import StepRecord, Surroundings
from phalanx.processing.policy.transition import Transition

NAMES = ("pi0_new_line_processor", "smolvla_new_line_processor")
"""Two names of the same step; it is written by the one that it was read by."""


class NewlineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """It has none."""


@dataclass(frozen=True)
class NewlinePrompt:
    registry_name: str

    @classmethod
    def read(cls, record: StepRecord, _: Surroundings) -> NewlinePrompt:
        record.settings(NewlineSettings)
        return cls(record.registry_name)

    @property
    def config(self) -> dict[str, object]:
        return {}

    @property
    def state(self) -> Mapping[str, Tensor]:
        return {}

    def __call__(self, transition: Transition) -> Transition:
        tasks = (task if task.endswith("\n") else f"{task}\n" for task in transition.tasks)
        return replace(transition, tasks=tuple(tasks))
