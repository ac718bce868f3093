"""Penalties on tokens that a request has already seen.

Frequency and presence penalties count output tokens and are subtracted from the logits (OpenAI's
definition); the repetition penalty divides positive and multiplies negative logits of every token
in prompt or output (Keskar et al., CTRL, 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    """One request's penalties; the defaults change nothing."""

    frequency: float = 0.0
    presence: float = 0.0
    repetition: float = 1.0

    @property
    def active(self) -> bool:
        return self.frequency != 0.0 or self.presence != 0.0 or self.repetition != 1.0


class TokenHistory:
    """How often each token was produced, and which were seen at all, prompt included."""

    def __init__(
        self,
        vocab_size: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        device: torch.device,
    ) -> None:
        self._counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._one = torch.ones(1, device=device)
        if len(output_ids):
            ids = torch.tensor(list(output_ids), device=device)
            self._counts.index_add_(0, ids, torch.ones(len(output_ids), device=device))
        if len(prompt_ids) or len(output_ids):
            self._seen[torch.tensor([*prompt_ids, *output_ids], device=device)] = True

    def add(self, token: Tensor) -> None:
        """Count one sampled token (an int64 scalar)."""
        # As an index on its own a scalar would be read by the host.
        ids = token.unsqueeze(0)
        self._counts.index_add_(0, ids, self._one)
        self._seen.index_fill_(0, ids, True)

    def copy_to(self, counts: Tensor, seen: Tensor) -> None:
        """Write the counts, float32 [vocabulary], and what was seen, bool [vocabulary]."""
        counts.copy_(self._counts)
        seen.copy_(self._seen)

    def penalize(self, logits: Tensor, penalties: Penalties) -> None:
        """Change one row of float32 logits [vocabulary] in place."""
        if penalties.repetition != 1.0:
            factor = penalties.repetition
            scaled = torch.where(logits > 0, logits / factor, logits * factor)
            torch.where(self._seen, scaled, logits, out=logits)
        if penalties.frequency != 0.0:
            logits.sub_(self._counts, alpha=penalties.frequency)
        if penalties.presence != 0.0:
            logits.sub_((self._counts > 0).float(), alpha=penalties.presence)
