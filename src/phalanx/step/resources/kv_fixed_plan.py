"""The plan of one label of a captured step, in the static buffers of its slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.device.operators.base import PagedPlan
from phalanx.errors import ConfigurationError
from phalanx.step.declaration import Segment
from phalanx.step.lease import SlotLease
from phalanx.step.resources.cache_stream import CacheStream
from phalanx.step.resources.kv_addressing import slots_of, table_of
from phalanx.step.resources.slot_buffers import SlotBuffers

Rows = Sequence[tuple[Segment, CacheStream]]


@dataclass(frozen=True)
class StaticTarget:
    """Where the plans of a captured step go, with page tables of `num_pages` a row."""

    lease: SlotLease
    buffers: SlotBuffers
    num_pages: int


def fixed_plan(
    label: str, sources: Sequence[Rows], page_size: int, target: StaticTarget
) -> PagedPlan:
    """A plan of the bucket's sizes; padding rows read and write the sink.

    A combined label has all rows and tokens of the bucket once for each of its `sources`.
    """
    lease, buffers, times = target.lease, target.buffers, len(sources)
    bucket = lease.bucket
    row_span = 0 if bucket.packed else bucket.tokens // bucket.rows
    _check(label, sources, lease, row_span)
    slots = np.zeros(times * bucket.tokens, dtype=np.int64)
    table = np.zeros((times * bucket.rows, target.num_pages), dtype=np.int32)
    lens = np.ones(times * bucket.rows, dtype=np.int32)
    starts = np.zeros(times * bucket.rows + 1, dtype=np.int32)
    for index, rows in enumerate(sources):
        spans = [segment.span for segment, _ in rows]
        streams = [stream for _, stream in rows]
        held = [stream.stored_len + span for stream, span in zip(streams, spans, strict=True)]
        if max(held, default=0) > target.num_pages * page_size:
            raise ConfigurationError(
                f"a row of label {label!r} has {max(held)} tokens, more than the "
                f"{target.num_pages * page_size} that the captured step looks at (max_context)"
            )
        at_token, at_row = index * bucket.tokens, index * bucket.rows
        slots[at_token : at_token + sum(spans)] = slots_of(spans, streams, page_size)
        table[at_row : at_row + len(rows)] = table_of(held, streams, page_size, target.num_pages)
        lens[at_row : at_row + len(rows)] = held
        starts[1 : len(rows) + 1] = np.cumsum(spans, dtype=np.int32)
        starts[len(rows) + 1 :] = sum(spans)
    if row_span:
        starts = np.arange(0, len(slots) + 1, row_span, dtype=np.int32)
    return PagedPlan(
        slots=buffers.tokens(lease, f"{label}.slots", slots, 0, times),
        query_starts=buffers.starts(lease, f"{label}.starts", starts, times),
        page_table=buffers.rows(lease, f"{label}.table.{target.num_pages}", table, 0, times),
        kv_lens=buffers.rows(lease, f"{label}.lens", lens, 1, times),
        spans=(),
        lens=(),
        num_single=0,
        fixed=True,
        row_span=row_span,
    )


def _check(label: str, sources: Sequence[Rows], lease: SlotLease, row_span: int) -> None:
    bucket = lease.bucket
    if bucket.packed and len(sources) > 1:
        raise ConfigurationError(
            f"combined label {label!r} in a packed capture of walk {bucket.walk!r}; "
            "capture it batched, with equally many tokens a row"
        )
    for rows in sources:
        spans = [segment.span for segment, _ in rows]
        # A label that is only read, such as a context, has no tokens in any row.
        uneven = any(spans) and any(span != row_span for span in spans)
        fits = len(spans) <= bucket.rows and sum(spans) <= bucket.tokens
        if not fits or (row_span and uneven):
            raise ConfigurationError(
                f"label {label!r} has rows of {spans} tokens in a capture of {bucket.rows} rows of "
                f"{row_span or 'any number of'} tokens, {bucket.tokens} in all (walk "
                f"{bucket.walk!r})"
            )
