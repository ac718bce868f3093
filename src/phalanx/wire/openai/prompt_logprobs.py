"""vLLM's `prompt_logprobs`: at each position of the prompt its likeliest tokens, and its own."""

from __future__ import annotations

import msgspec

from phalanx.schema.generate import TokenLogprobs
from phalanx.wire.openai.logprobs import TokenTexts


class RankedLogprob(msgspec.Struct, frozen=True):
    """`rank` counts from 1. A token that is not among those that were asked for is given the rank
    behind them, which it has at best."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, RankedLogprob] | None]
"""By token id, as text; None for the first token, which nothing precedes."""


def prompt_logprobs(logprobs: TokenLogprobs, num_top: int, texts: TokenTexts) -> PromptLogprobs:
    """Every position of the prompt."""
    rows: PromptLogprobs = []
    for at, (own, value) in enumerate(zip(logprobs.token_ids, logprobs.values, strict=True)):
        if value is None:
            rows.append(None)
            continue
        top = (logprobs.top[at] if logprobs.top is not None else None) or ()
        row = {
            str(one): RankedLogprob(score, rank, texts.token_text(one))
            for rank, (score, one) in enumerate(top[:num_top], start=1)
        }
        row.setdefault(str(own), RankedLogprob(value, num_top + 1, texts.token_text(own)))
        rows.append(row)
    return rows
