"""Sizes of pi0.5: those of the published model, and those that a user gives."""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.errors import ConfigurationError
from phalanx.models.pi.config import PiConfig
from phalanx.models.pi.geometry import PUBLISHED


@dataclass(frozen=True)
class PI05Config(PiConfig):
    """See `PiConfig`. `add_value_head`: a critic, for rollouts; its weights are those of the
    checkpoint, or come with the first update. `value_from`: it values the `prefix`, once, or the
    `suffix`, at each step.
    """

    add_value_head: bool = False
    value_from: str = "suffix"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.value_from not in ("prefix", "suffix"):
            raise ConfigurationError(f"value_from={self.value_from!r}; allowed: prefix, suffix")


PI05_BASE = replace(PUBLISHED, tokenizer_max_length=200)
