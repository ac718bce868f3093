"""Turns each row's prompt into token ids of one length, with a mask of those that are not padding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Self

import msgspec
import torch
from msgspec import UNSET, UnsetType

from phalanx.processing.policy.prompt_tokenizer import PromptTokenizer
from phalanx.processing.policy.state_prompt import StatePrompt
from phalanx.processing.policy.step import SettingsStep, StepRecord, Surroundings
from phalanx.processing.policy.tokenizer_files import find_tokenizer
from phalanx.processing.policy.transition import TOKEN_MASK, TOKENS, Transition

NAME = "tokenizer_processor"


class TokenizationSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`tokenizer_name`: a name on a hub, or a folder of the checkpoint where it was saved."""

    max_length: int = 512
    task_key: str = "task"
    padding_side: Literal["left", "right"] = "right"
    padding: Literal["max_length", "longest"] = "max_length"
    truncation: bool = True
    tokenizer_name: str | UnsetType = UNSET


@dataclass(frozen=True)
class Tokenization(SettingsStep[TokenizationSettings]):
    """The beginning token first; longer prompts lose their end where `truncation` is set.

    Those that end with the robot's state are refused instead: they would lose that.
    """

    name = NAME
    settings_cls = TokenizationSettings

    tokenizer: PromptTokenizer = field(repr=False)

    @classmethod
    def read(cls, record: StepRecord, surroundings: Surroundings) -> Self:
        settings = record.settings(TokenizationSettings)
        name = settings.tokenizer_name
        directory = find_tokenizer(
            surroundings.directory,
            surroundings.tokenizer_dir,
            None if isinstance(name, UnsetType) else name,
        )
        tokenizer = PromptTokenizer(
            directory,
            length=settings.max_length,
            pad_to_length=settings.padding == "max_length",
            side=settings.padding_side,
            truncate=settings.truncation
            and not any(isinstance(step, StatePrompt) for step in surroundings.earlier),
        )
        return cls(settings, tokenizer)

    def __call__(self, transition: Transition) -> Transition:
        ids, masks = self.tokenizer.encode(transition.tasks)
        device = next((value.device for value in transition.observation.values()), None)
        return transition.with_observation(
            {
                TOKENS: torch.tensor(ids, dtype=torch.int64, device=device),
                TOKEN_MASK: torch.tensor(masks, dtype=torch.bool, device=device),
            }
        )
