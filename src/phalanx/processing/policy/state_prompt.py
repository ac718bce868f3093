"""pi0.5's prompt: the task, and the normalized state as numbers of 256 bins."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from phalanx.errors import InvalidRequestError
from phalanx.processing.policy.clean_prompt import cleaned
from phalanx.processing.policy.step import SettingsStep
from phalanx.processing.policy.transition import STATE, Transition

NAME = "pi05_prepare_state_tokenizer_processor_step"
_LOWER_EDGES = np.linspace(-1, 1, 257)[:-1]


class StatePromptSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Both are written by some versions and change nothing."""

    max_state_dim: int | UnsetType = UNSET
    task_key: str | UnsetType = UNSET


@dataclass(frozen=True)
class StatePrompt(SettingsStep[StatePromptSettings]):
    """A state below -1 is in bin -1, one above 1 in bin 255."""

    name = NAME
    settings_cls = StatePromptSettings

    def __call__(self, transition: Transition) -> Transition:
        state = transition.observation.get(STATE)
        if state is None:
            raise InvalidRequestError(
                "there is no state, and the prompt of this policy has it; send it", field="state"
            )
        rows = np.digitize(state.cpu().numpy(), _LOWER_EDGES) - 1
        prompts = (prompt(task, row) for task, row in zip(transition.tasks, rows, strict=True))
        return replace(transition, tasks=tuple(prompts))


def prompt(task: str, bins: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> str:
    """The text that the policy was trained with."""
    return f"Task: {cleaned(task)}, State: {' '.join(map(str, bins.tolist()))};\nAction: "
