"""Sampling with every row's settings on the device, in one fixed computation for all kinds of rows.

It draws what `sampling.draw` draws from the same numbers, but for rounding in sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from phalanx.step.lease import SlotLease
from phalanx.step.resources.penalties import Penalties
from phalanx.step.resources.sampling import RowFilter
from phalanx.step.resources.slot_buffers import SlotBuffers

_GREEDY = RowFilter(0.0)
_NO_PENALTIES = Penalties()


@dataclass(frozen=True)
class RowSettings:
    """What one row of a step draws with; `adjusts` if its bias row is to be added."""

    row: RowFilter = _GREEDY
    draw: float = 0.0
    penalties: Penalties = _NO_PENALTIES
    adjusts: bool = False


@dataclass(frozen=True)
class CapturedRows:
    """The static buffers of one slot, cut to a bucket: settings `[rows, 1]`, `[rows, vocabulary]`
    of what is added to and known of tokens, and where the tokens go, int64 [rows].
    """

    greedy: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    draws: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    adjusts: Tensor
    bias: Tensor
    counts: Tensor
    seen: Tensor
    tokens: Tensor
    at: tuple[int, ...] = ()
    """Which rows of the bucket sample in this step."""
    greedy_only: bool = False


def captured_rows(
    lease: SlotLease,
    buffers: SlotBuffers,
    vocab_size: int,
    settings: Sequence[RowSettings],
    at: tuple[int, ...],
) -> CapturedRows:
    """Write one row of settings for each row of a step; padding is greedy."""
    filters = [one.row for one in settings]

    def column(name: str, values: Sequence[float], dtype: type[np.generic], fill: int) -> Tensor:
        array = np.array(values, dtype=dtype).reshape(-1, 1)
        return buffers.rows(lease, f"sampler.{name}", array, fill)

    def dense(name: str, dtype: torch.dtype) -> Tensor:
        return buffers.tensor(lease, f"sampler.{name}", (vocab_size,), dtype)

    penalties = [one.penalties for one in settings]
    return CapturedRows(
        greedy=column("greedy", [row.greedy for row in filters], np.bool_, 1),
        temperature=column(
            "temperature",
            [1.0 if row.greedy else row.temperature for row in filters],
            np.float32,
            1,
        ),
        top_k=column("top_k", [max(row.top_k, 0) for row in filters], np.int64, 0),
        top_p=column("top_p", [row.top_p for row in filters], np.float32, 1),
        min_p=column("min_p", [row.min_p for row in filters], np.float32, 0),
        draws=column("draws", [one.draw for one in settings], np.float64, 0),
        repetition=column("repetition", [one.repetition for one in penalties], np.float32, 1),
        frequency=column("frequency", [one.frequency for one in penalties], np.float32, 0),
        presence=column("presence", [one.presence for one in penalties], np.float32, 0),
        adjusts=column("adjusts", [one.adjusts for one in settings], np.bool_, 0),
        bias=dense("bias", torch.float32),
        counts=dense("counts", torch.float32),
        seen=dense("seen", torch.bool),
        tokens=buffers.tensor(lease, "sampler.tokens", (), torch.int64),
        at=at,
    )


def sample_captured(rows: CapturedRows, logits: Tensor, allowed: Tensor | None) -> Tensor:
    """Tokens of all rows of the bucket, left in `rows.tokens`."""
    if rows.greedy_only:
        hidden = logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)
        return rows.tokens.copy_(hidden.argmax(dim=-1))
    adjusted = _penalized(rows, logits.float())
    adjusted = torch.where(rows.adjusts, adjusted + rows.bias, adjusted)
    if allowed is not None:
        adjusted = adjusted.masked_fill(~allowed, -torch.inf)
    probs = torch.softmax(adjusted / rows.temperature, dim=-1)
    drawn = torch.where(_filtered(rows), _draw_filtered(rows, probs), _invert(probs, rows.draws))
    tokens = torch.where(rows.greedy, adjusted.argmax(dim=-1, keepdim=True), drawn)
    return rows.tokens.copy_(tokens.squeeze(1))


def _penalized(rows: CapturedRows, logits: Tensor) -> Tensor:
    scaled = torch.where(logits > 0, logits / rows.repetition, logits * rows.repetition)
    logits = torch.where(rows.seen, scaled, logits)
    logits = logits - rows.counts * rows.frequency
    return logits - (rows.counts > 0).float() * rows.presence


def _filtered(rows: CapturedRows) -> Tensor:
    return (rows.top_k > 0) | (rows.top_p < 1.0) | (rows.min_p > 0.0)


def _draw_filtered(rows: CapturedRows, probs: Tensor) -> Tensor:
    values, indices = probs.sort(dim=-1, descending=True)
    limited = rows.top_k > 0
    rank = torch.arange(values.shape[-1], device=values.device)
    kept = ~limited | (rank < rows.top_k)
    inside = torch.where(kept, values, 0.0)
    total = torch.where(limited, inside.sum(dim=-1, keepdim=True), 1.0)
    before = values.cumsum(dim=-1) - values
    kept &= (rows.top_p >= 1.0) | (before < rows.top_p * total)
    kept &= values >= rows.min_p * values[:, :1]
    kept[:, 0] = True
    found = _invert(torch.where(kept, values, 0.0), rows.draws)
    chosen = torch.minimum(found, kept.sum(dim=-1, keepdim=True) - 1)
    return indices.gather(1, chosen)


def _invert(probs: Tensor, draws: Tensor) -> Tensor:
    """The index [rows, 1] at which each row's cumulative sum first exceeds `draw * total`."""
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    found = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)
    return found.clamp_(max=probs.shape[-1] - 1)
