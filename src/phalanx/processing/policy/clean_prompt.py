"""An instruction on one line and without underscores, as openpi's prompts begin."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from phalanx.processing.policy.step import SettingsStep
from phalanx.processing.policy.transition import Transition

NAME = "clean_prompt_processor"


class CleanPromptSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """It has none."""


@dataclass(frozen=True)
class CleanPrompt(SettingsStep[CleanPromptSettings]):
    name = NAME
    settings_cls = CleanPromptSettings

    def __call__(self, transition: Transition) -> Transition:
        tasks = (cleaned(task) for task in transition.tasks)
        return replace(transition, tasks=tuple(tasks))


def cleaned(task: str) -> str:
    return task.strip().replace("_", " ").replace("\n", " ")
