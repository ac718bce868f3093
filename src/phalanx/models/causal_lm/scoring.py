"""Log-probabilities of chosen tokens from logits, in float32, in blocks of bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_ROWS = 256
"""Rows of logits held at a time when a prompt is scored."""
CACHE_ROWS = 4
"""Rows that a CPU turns to float32 and sums at a time: few enough to stay in its cache."""


@dataclass(frozen=True)
class Scores:
    """One row a token: its log-probability [n], the `k` best (values and ids, [n, k]), and those
    of the ids asked for [n, m].
    """

    values: Tensor
    top_values: Tensor
    top_ids: Tensor
    selected: Tensor


Chosen = Sequence[int] | Tensor
"""Token ids for all rows, or those of each row, int64 [n, m]."""


def score(logits: Tensor, tokens: Tensor, top_k: int, token_ids: Chosen) -> Scores:
    """Scores of `tokens` [n] under `logits` [n, vocabulary]."""
    if logits.device.type != "cpu" or len(tokens) <= CACHE_ROWS:
        return _score(logits, tokens, top_k, token_ids)
    starts = range(0, len(tokens), CACHE_ROWS)
    slices = [slice(start, start + CACHE_ROWS) for start in starts]
    return joined(
        [_score(logits[rows], tokens[rows], top_k, _of_rows(token_ids, rows)) for rows in slices]
    )


def _of_rows(token_ids: Chosen, rows: slice) -> Chosen:
    return token_ids[rows] if isinstance(token_ids, Tensor) else token_ids


def _score(logits: Tensor, tokens: Tensor, top_k: int, token_ids: Chosen) -> Scores:
    # Not logsumexp, which shares a single row out among threads, and so rounds it otherwise alone.
    logits = logits.float()
    scores = logits.log_softmax(dim=-1)
    values = scores.gather(1, tokens[:, None])
    if top_k:
        # Of logits: different ones may have the same score.
        top_ids = logits.topk(min(top_k, logits.shape[-1]), dim=-1).indices
        top_values = scores.gather(1, top_ids)
    else:
        top_values, top_ids = values[:, :0], tokens[:, None][:, :0]
    if isinstance(token_ids, Tensor):
        selected = scores.gather(1, token_ids)
    elif token_ids:
        selected = scores.index_select(1, torch.tensor(token_ids, device=scores.device))
    else:
        selected = values[:, :0]
    return Scores(values[:, 0], top_values, top_ids, selected)


def joined(parts: Sequence[Scores]) -> Scores:
    """Blocks of one sequence as a whole."""
    return Scores(
        torch.cat([part.values for part in parts]),
        torch.cat([part.top_values for part in parts]),
        torch.cat([part.top_ids for part in parts]),
        torch.cat([part.selected for part in parts]),
    )
