"""Sizes of the generation benchmark."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import ConfigurationError

PREFILL_TOKENS = 512
SCORED_PROMPTS, SCORED_TOKENS = 16, 256


@dataclass(frozen=True)
class Workload:
    """Sizes: `prompts` requests of `prompt_tokens`, each answered with `new_tokens`."""

    prompts: int = 32
    prompt_tokens: int = 64
    new_tokens: int = 64
    concurrency: tuple[int, ...] = (1, 8, 32)

    def __post_init__(self) -> None:
        for name in ("prompts", "prompt_tokens", "new_tokens"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"--{name.replace('_', '-')} must be at least 1")
        if not self.concurrency or min(self.concurrency) < 1:
            raise ConfigurationError("--concurrency needs positive numbers, for example 1,8,32")

    @property
    def max_length(self) -> int:
        return max(self.prompt_tokens + self.new_tokens, PREFILL_TOKENS + 1, SCORED_TOKENS + 1)
