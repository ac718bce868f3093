"""From rows of queries and the pages of their contexts to the addressing that attention reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from phalanx.device.base import DeviceBackend
from phalanx.device.operators.base import PagedPlan
from phalanx.errors import ConfigurationError
from phalanx.step.lease import SlotLease
from phalanx.step.resources.page_pool import SINK_PAGE
from phalanx.step.resources.slot_buffers import SlotBuffers


@dataclass(frozen=True)
class ContextPlan:
    """One label's queries. `answered` is False for tokens whose context is empty, or None where
    there are none: they read the sink and get zeros.
    """

    paged: PagedPlan
    answered: Tensor | None


@dataclass(frozen=True)
class ContextRow:
    """One row of queries and the context that it reads: equal rows have equal plans."""

    request_id: str
    span: int
    length: int
    generation: int
    pages: tuple[int, ...]


def context_plan(rows: Sequence[ContextRow], backend: DeviceBackend) -> ContextPlan:
    """The plan of these rows, and no others."""
    spans = [row.span for row in rows]
    starts = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(spans, out=starts[1:])
    # An empty context reads one token of the sink, which is then put aside.
    lens = [row.length or 1 for row in rows]
    pages = [row.pages or (SINK_PAGE,) for row in rows]
    table = np.full((len(rows), max((len(one) for one in pages), default=1)), SINK_PAGE, np.int32)
    for row, numbers in enumerate(pages):
        table[row, : len(numbers)] = numbers
    answered = None
    if any(row.length == 0 for row in rows):
        answered = backend.upload(np.repeat([row.length > 0 for row in rows], spans))
    paged = PagedPlan(
        slots=backend.upload(np.empty(0, dtype=np.int64)),
        query_starts=backend.upload(starts),
        page_table=backend.upload(table),
        kv_lens=backend.upload(np.array(lens, dtype=np.int32)),
        spans=tuple(spans),
        lens=tuple(lens),
        num_single=next((at for at, span in enumerate(spans) if span != 1), len(spans)),
        causal=False,
    )
    return ContextPlan(paged, answered)


def fixed_context_plan(
    label: str,
    sources: Sequence[Sequence[ContextRow]],
    lease: SlotLease,
    buffers: SlotBuffers,
    num_pages: int,
) -> ContextPlan:
    """The plan of a captured step, in the static buffers of its slot; padding reads the sink.

    A combined label has all rows and tokens of the bucket once for each of its `sources`.
    """
    times, bucket = len(sources), lease.bucket
    row_span = 0 if bucket.packed else bucket.tokens // bucket.rows
    for rows in sources:
        _check(label, rows, times, lease, num_pages)
    table = np.full((times * bucket.rows, num_pages), SINK_PAGE, dtype=np.int32)
    lens = np.ones(times * bucket.rows, dtype=np.int32)
    starts = np.arange(0, times * bucket.tokens + 1, row_span or 1, dtype=np.int32)
    answered = np.zeros(times * bucket.tokens, dtype=np.bool_)
    for index, rows in enumerate(sources):
        at_token = index * bucket.tokens
        for at_row, row in enumerate(rows, index * bucket.rows):
            table[at_row, : len(row.pages)] = row.pages
            lens[at_row] = row.length or 1
            answered[at_token : at_token + row.span] = row.length > 0
            at_token += row.span
    if not row_span:
        starts = np.cumsum([0, *(row.span for row in sources[0])], dtype=np.int32)
    paged = PagedPlan(
        slots=buffers.tokens(lease, f"{label}.slots", np.zeros(0, np.int64), 0, times),
        query_starts=buffers.starts(lease, f"{label}.starts", starts, times),
        page_table=buffers.rows(lease, f"{label}.table.{num_pages}", table, SINK_PAGE, times),
        kv_lens=buffers.rows(lease, f"{label}.lens", lens, 1, times),
        spans=(),
        lens=(),
        num_single=0,
        causal=False,
        fixed=True,
        row_span=row_span,
    )
    return ContextPlan(paged, buffers.tokens(lease, f"{label}.answered", answered, 0, times))


def _check(
    label: str, rows: Sequence[ContextRow], times: int, lease: SlotLease, num_pages: int
) -> None:
    bucket = lease.bucket
    row_span = 0 if bucket.packed else bucket.tokens // bucket.rows
    if bucket.packed and times > 1:
        raise ConfigurationError(
            f"combined label {label!r} in a packed capture of walk {bucket.walk!r}; "
            "capture it batched, with equally many tokens a row"
        )
    for row in rows:
        if row_span and row.span != row_span:
            raise ConfigurationError(
                f"label {label!r} has a row of {row.span} tokens in a capture of {row_span} tokens "
                f"a row (walk {bucket.walk!r})"
            )
        if len(row.pages) > num_pages:
            raise ConfigurationError(
                f"the context of request {row.request_id!r} has {row.length} tokens, more than the "
                f"{num_pages} pages that the captured step looks at (max_context)"
            )
