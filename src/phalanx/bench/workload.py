"""Sizes of the generation benchmark."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import ConfigurationError

PREFILL_TOKENS = 512
SCORED_PROMPTS, SCORED_TOKENS = 16, 256
SHARED_TOKENS = 512
SHARED_PREFIX = "shared-prefix"
PARTS = ("generate", "prefill", "score", SHARED_PREFIX)
"""The parts of the benchmark; a run without a choice leaves out the last."""


@dataclass(frozen=True)
class Workload:
    """Sizes: `prompts` requests of `prompt_tokens`, each answered with `new_tokens`. `parts` are those
    of `PARTS` that are run.
    """

    prompts: int = 32
    prompt_tokens: int = 64
    new_tokens: int = 64
    concurrency: tuple[int, ...] = (1, 8, 32)
    parts: tuple[str, ...] = PARTS[:-1]

    def __post_init__(self) -> None:
        for name in ("prompts", "prompt_tokens", "new_tokens"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"--{name.replace('_', '-')} must be at least 1")
        if not self.concurrency or min(self.concurrency) < 1:
            raise ConfigurationError("--concurrency needs positive numbers, for example 1,8,32")
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown or not self.parts:
            raise ConfigurationError(
                f"--only {','.join(self.parts)!r} must name parts of {', '.join(PARTS)}"
            )

    @property
    def max_length(self) -> int:
        generated = self.prompt_tokens + self.new_tokens
        if SHARED_PREFIX in self.parts:
            generated += SHARED_TOKENS
        return max(generated, PREFILL_TOKENS + 1, SCORED_TOKENS + 1)

    @property
    def most_in_flight(self) -> int:
        """The most requests that a system must take at a time."""
        return max(*self.concurrency, self.prompts if SHARED_PREFIX in self.parts else 1)
