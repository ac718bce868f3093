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
    """The static buffers of one slot, cut to a bucket."""

    settings: Tensor
    """float64 [rows, settings], in the order of `_numbers`."""
    bias: Tensor
    """float32 [rows, vocabulary], added where a row adjusts."""
    counts: Tensor
    """float32 [rows, vocabulary]: how often each token was produced."""
    seen: Tensor
    """bool [rows, vocabulary]."""
    tokens: Tensor
    """int64 [rows]: where the tokens go."""
    at: tuple[int, ...]
    """Which rows of the bucket sample in this step."""
    greedy_only: bool


def _numbers(one: RowSettings) -> tuple[float, ...]:
    row, penalties = one.row, one.penalties
    return (
        row.greedy,
        1.0 if row.greedy else row.temperature,
        max(row.top_k, 0),
        row.top_p,
        row.min_p,
        one.draw,
        penalties.repetition,
        penalties.frequency,
        penalties.presence,
        one.adjusts,
    )


def captured_rows(
    lease: SlotLease,
    buffers: SlotBuffers,
    vocab_size: int,
    settings: Sequence[RowSettings],
    at: tuple[int, ...],
    *,
    greedy_only: bool,
) -> CapturedRows:
    """Write one row of settings for each row of a step; padding is greedy."""

    def dense(name: str, dtype: torch.dtype) -> Tensor:
        return buffers.tensor(lease, f"sampler.{name}", (vocab_size,), dtype)

    padding = [RowSettings()] * (lease.bucket.rows - len(settings))
    numbers = np.array([_numbers(one) for one in (*settings, *padding)], dtype=np.float64)
    return CapturedRows(
        settings=buffers.rows(lease, "sampler.settings", numbers, 0),
        bias=dense("bias", torch.float32),
        counts=dense("counts", torch.float32),
        seen=dense("seen", torch.bool),
        tokens=buffers.tensor(lease, "sampler.tokens", (), torch.int64),
        at=at,
        greedy_only=greedy_only,
    )


@dataclass(frozen=True)
class _Columns:
    """The settings as columns [rows, 1] of the types that they are computed with."""

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

    @classmethod
    def of(cls, settings: Tensor) -> _Columns:
        types = (torch.bool, *[torch.float32] * 4, torch.float64, *[torch.float32] * 3, torch.bool)
        parts = zip(settings.unbind(1), types, strict=True)
        return cls(*(part[:, None].to(dtype) for part, dtype in parts))


def sample_captured(rows: CapturedRows, logits: Tensor, allowed: Tensor | None) -> Tensor:
    """Tokens of all rows of the bucket, left in `rows.tokens`."""
    if rows.greedy_only:
        hidden = logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)
        return rows.tokens.copy_(hidden.argmax(dim=-1))
    columns = _Columns.of(rows.settings)
    adjusted = _penalized(rows, columns, logits.float())
    adjusted = torch.where(columns.adjusts, adjusted + rows.bias, adjusted)
    if allowed is not None:
        adjusted = adjusted.masked_fill(~allowed, -torch.inf)
    probs = torch.softmax(adjusted / columns.temperature, dim=-1)
    plain = _invert(probs, columns.draws)
    drawn = torch.where(_filtered(columns), _draw_filtered(columns, probs), plain)
    tokens = torch.where(columns.greedy, adjusted.argmax(dim=-1, keepdim=True), drawn)
    return rows.tokens.copy_(tokens.squeeze(1))


def _penalized(rows: CapturedRows, columns: _Columns, logits: Tensor) -> Tensor:
    scaled = torch.where(logits > 0, logits / columns.repetition, logits * columns.repetition)
    logits = torch.where(rows.seen, scaled, logits)
    logits = logits - rows.counts * columns.frequency
    return logits - (rows.counts > 0).float() * columns.presence


def _filtered(columns: _Columns) -> Tensor:
    return (columns.top_k > 0) | (columns.top_p < 1.0) | (columns.min_p > 0.0)


def _draw_filtered(columns: _Columns, probs: Tensor) -> Tensor:
    values, indices = probs.sort(dim=-1, descending=True)
    limited = columns.top_k > 0
    rank = torch.arange(values.shape[-1], device=values.device)
    kept = ~limited | (rank < columns.top_k)
    inside = torch.where(kept, values, 0.0)
    total = torch.where(limited, inside.sum(dim=-1, keepdim=True), 1.0)
    before = values.cumsum(dim=-1) - values
    kept &= (columns.top_p >= 1.0) | (before < columns.top_p * total)
    kept &= values >= columns.min_p * values[:, :1]
    kept[:, 0] = True
    found = _invert(torch.where(kept, values, 0.0), columns.draws)
    chosen = torch.minimum(found, kept.sum(dim=-1, keepdim=True) - 1)
    return indices.gather(1, chosen)


def _invert(probs: Tensor, draws: Tensor) -> Tensor:
    """The index [rows, 1] at which each row's cumulative sum first exceeds `draw * total`."""
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    found = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)
    return found.clamp_(max=probs.shape[-1] - 1)
