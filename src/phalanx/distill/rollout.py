"""What a rollout asks of the student: prompts, how many answers of each, and how they are sampled."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from types import MappingProxyType

from phalanx.distill.asking import AskingSettings
from phalanx.distill.sample import MAX_TOP_K, MetaValue, Sample, TeacherRequest, check_ids
from phalanx.errors import ConfigurationError, InvalidRequestError

_OURS = ("max_new_tokens", "sampling_seed", "n")


@dataclass(frozen=True)
class Prompt:
    """One prompt, as token ids or as text (exactly one of them), whose answers are a group.

    `teacher` is what the teacher will be asked about each answer, where that is known already.
    `metadata` goes with every sample.
    """

    group_id: str
    input_ids: tuple[int, ...] | None = None
    text: str | None = None
    metadata: Mapping[str, MetaValue] = field(default_factory=dict)
    teacher: TeacherRequest | None = None

    def __post_init__(self) -> None:
        if not self.group_id:
            raise InvalidRequestError("group_id is empty; give a name", field="group_id")
        if (self.input_ids is None) == (self.text is None):
            raise InvalidRequestError(
                f"prompt {self.group_id!r}: give exactly one of input_ids and text", field="text"
            )
        if not (self.input_ids or self.text):
            raise InvalidRequestError(f"prompt {self.group_id!r} is empty", field="text")
        if self.input_ids is not None:
            object.__setattr__(self, "input_ids", tuple(self.input_ids))
            check_ids("input_ids", self.input_ids)
        object.__setattr__(self, "metadata", MappingProxyType(dict(self.metadata)))

    @property
    def fields(self) -> dict[str, object]:
        """What a request says of it."""
        if self.input_ids is not None:
            return {"input_ids": list(self.input_ids)}
        return {"text": self.text, "return_prompt_token_ids": True}


@dataclass(frozen=True)
class RolloutSettings:
    """`num_samples` answers of at most `max_new_tokens` tokens to every prompt.

    `seed` makes them reproducible: each answer has a seed of its own, which depends on this one, the
    batch, the group and the index. `sampling` holds further `sampling_params`. `top_logprobs` of the
    likeliest tokens are kept at each position, for `student_topk` and `union`. `weight_version` is
    the one that has to answer, where that matters. An answer that was cut off goes on at most
    `max_continuations` times.
    """

    num_samples: int = 1
    max_new_tokens: int = 128
    seed: int = 0
    sampling: Mapping[str, object] = field(default_factory=dict)
    top_logprobs: int = 0
    model: str | None = None
    weight_version: str | None = None
    max_continuations: int = 16
    asking: AskingSettings = field(default_factory=AskingSettings)

    def __post_init__(self) -> None:
        for name, least in (("num_samples", 1), ("max_new_tokens", 1), ("max_continuations", 0)):
            if getattr(self, name) < least:
                raise ConfigurationError(f"{name}={getattr(self, name)} must be at least {least}")
        if not 0 <= self.top_logprobs <= MAX_TOP_K:
            raise ConfigurationError(
                f"top_logprobs={self.top_logprobs} must be from 0 to {MAX_TOP_K}"
            )
        for name in _OURS:
            if name in self.sampling:
                raise ConfigurationError(
                    f"sampling holds {name!r}, which is a setting of its own: max_new_tokens, seed,"
                    " num_samples"
                )
        object.__setattr__(self, "sampling", MappingProxyType(dict(self.sampling)))

    def seed_of(self, batch_id: str, group_id: str, index: int, num_tokens: int = 0) -> int:
        """The seed of one answer, or of its part from token `num_tokens` on."""
        text = f"{self.seed}\0{batch_id}\0{group_id}\0{index}\0{num_tokens}"
        # 31 bits are what every server takes.
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


Message = Mapping[str, object]


@dataclass(frozen=True)
class Grading:
    """How a judge is asked about a sample, and what its words are worth.

    `messages` makes the conversation that it answers, `reward` a finite number of its words.
    `sampling` holds `sampling_params`. `route_key` or `model` choose the judge.
    """

    messages: Callable[[Sample], Sequence[Message]]
    reward: Callable[[str, Sample], float]
    sampling: Mapping[str, object] = field(default_factory=lambda: {"temperature": 0})
    model: str | None = None
    route_key: str | None = None
    asking: AskingSettings = field(default_factory=AskingSettings)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampling", MappingProxyType(dict(self.sampling)))


def checked_reward(value: float, sample_id: str, said: str) -> float:
    """Raise `InvalidRequestError` for what is no reward."""
    # Numbers of numpy are real ones too.
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise InvalidRequestError(
            f"reward({said!r:.80}) of sample {sample_id!r} is {value!r}; return a finite number",
            field="reward",
        )
    return float(value)
