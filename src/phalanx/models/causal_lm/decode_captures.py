"""Which steps of a language model are captured: those in which every row computes one token, and
nothing of what follows is decided on the host (by a grammar) or told of it (log-probabilities).

All that decides is fixed for a request's life, since it is also asked ahead of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.models.causal_lm.sequence import WALK
from phalanx.models.causal_lm.sequence import Sequence as TokenSequence
from phalanx.schema.sampling import SamplingParams
from phalanx.step.graphs.capture_config import CaptureConfig
from phalanx.step.graphs.shapes import Shapes
from phalanx.step.submodule import StepRow

_SHORT_CONTEXT = 1024
"""The fewest tokens that captured attention looks at; then twice as many, up to all there may be."""
_MAX_POOLS_GATHERED = 2
"""How often the cache's tokens fit what a captured step gathers; far more than there can be tokens
is slower than an eager step, and takes the memory too."""


@dataclass(frozen=True)
class DecodeKey:
    """One kind of captured step: only most likely tokens or any draws, and the longest context."""

    greedy: bool
    max_context: int


class DecodeCaptures:
    """See the module."""

    def __init__(
        self, max_rows: int, context_length: int, pool_tokens: int, device: torch.device
    ) -> None:
        """`context_length` is at most `pool_tokens`, which the cache holds over all requests."""
        sizes = [*_doubled(1, max_rows), max_rows]
        contexts = [*_doubled(_SHORT_CONTEXT, context_length), context_length]
        most = _MAX_POOLS_GATHERED * pool_tokens
        self._shapes = {
            context: Shapes(rows=tuple(rows for rows in sizes if rows * context <= most))
            for context in contexts
        }
        self._device = device

    def configs(self) -> tuple[CaptureConfig, ...]:
        """Every kind of step; a step that is larger or of another kind is computed eagerly."""
        return tuple(
            CaptureConfig(WALK, shapes, key=DecodeKey(greedy, longest), caps_eager_batch_size=False)
            for longest, shapes in self._shapes.items()
            for greedy in (True, False)
        )

    def key(self, rows: Sequence[StepRow]) -> DecodeKey | None:
        """The kind of a step of these rows; None for one that is not captured."""
        greedy, longest = True, 1
        for row in rows:
            sequence: TokenSequence = row.info.state
            if row.span != 1 or sequence.constrained or sequence.scores.options is not None:
                return None
            greedy = greedy and _plainly_greedy(sequence.sampling)
            longest = max(longest, len(sequence.prompt_ids) + sequence.sampling.max_new_tokens)
        context = next((one for one in self._shapes if one >= longest), None)
        return None if context is None else DecodeKey(greedy, context)

    def static_inputs(self, tokens: int) -> dict[str, Tensor]:
        """Padding computes token 0 at position 0."""
        zeros = torch.zeros(tokens, dtype=torch.int64, device=self._device)
        return {"token_ids": zeros, "positions": zeros.clone()}


def _doubled(first: int, limit: int) -> list[int]:
    """`first` and its doubles, below `limit`."""
    return [first << power for power in range(limit.bit_length()) if first << power < limit]


def _plainly_greedy(sampling: SamplingParams) -> bool:
    """Whether tokens are the most likely ones, as the model gives them."""
    penalized = sampling.frequency_penalty or sampling.presence_penalty
    adjusted = penalized or sampling.repetition_penalty != 1.0 or sampling.logit_bias
    return sampling.greedy and not adjusted and not sampling.min_new_tokens
