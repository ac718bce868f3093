"""From a step's segments to the addressing that attention reads: one `PagedPlan` a plan label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.device.base import DeviceBackend
from phalanx.device.operators.base import PagedPlan
from phalanx.step.declaration import Segment
from phalanx.step.resources.cache_stream import CacheStream

Streams = Mapping[str, Mapping[str, CacheStream]]


@dataclass(frozen=True)
class KVPlan:
    """The plans of a step by label, and the rows of each as (request, label) in layout order."""

    by_label: Mapping[str, PagedPlan]
    rows: Mapping[str, tuple[Segment, ...]]
    starts: Mapping[str, tuple[int, ...]]
    """Committed tokens of each row before the step: where its new tokens begin."""
    copies: tuple[tuple[list[int], list[int]], ...] = ()
    """Pages to copy before the step is computed, from and to, for each fork."""


def build_plans(
    segments: Sequence[Segment],
    combined: Mapping[str, tuple[str, ...]],
    streams: Streams,
    page_size: int,
    backend: DeviceBackend,
    copies: tuple[tuple[list[int], list[int]], ...] = (),
) -> KVPlan:
    """Plan every label that the segments name, and every combined label over its sources.

    A combined plan lists its source labels one after another, label by label.
    """
    by_label: dict[str, list[Segment]] = {}
    for segment in segments:
        by_label.setdefault(segment.label, []).append(segment)
    rows = {label: tuple(rows) for label, rows in by_label.items()}
    for name, sources in combined.items():
        rows[name] = tuple(row for source in sources for row in rows.get(source, ()))
    plans: dict[str, PagedPlan] = {}
    starts: dict[str, tuple[int, ...]] = {}
    for label, group in rows.items():
        chosen = [streams[row.request_id][row.label] for row in group]
        starts[label] = tuple(stream.stored_len for stream in chosen)
        plans[label] = _paged_plan([row.span for row in group], chosen, page_size, backend)
    return KVPlan(plans, rows, starts, copies)


def _paged_plan(
    spans: list[int], streams: list[CacheStream], page_size: int, backend: DeviceBackend
) -> PagedPlan:
    lens = [stream.stored_len + span for stream, span in zip(streams, spans, strict=True)]
    counts = [-(-length // page_size) for length in lens]
    table = np.zeros((len(spans), max(counts, default=1) or 1), dtype=np.int32)
    for row, (stream, count) in enumerate(zip(streams, counts, strict=True)):
        table[row, :count] = stream.pages[:count]
    query_starts = np.zeros(len(spans) + 1, dtype=np.int32)
    np.cumsum(spans, out=query_starts[1:])
    return PagedPlan(
        slots=backend.upload(_slots(spans, streams, page_size)),
        query_starts=backend.upload(query_starts),
        page_table=backend.upload(table),
        kv_lens=backend.upload(np.array(lens, dtype=np.int32)),
        spans=tuple(spans),
        lens=tuple(lens),
        num_single=_leading_ones(spans),
    )


def _slots(spans: list[int], streams: list[CacheStream], page_size: int) -> NDArray[np.int64]:
    slots = np.empty(sum(spans), dtype=np.int64)
    at = 0
    for span, stream in zip(spans, streams, strict=True):
        if span == 1:
            page, offset = divmod(stream.stored_len, page_size)
            slots[at] = int(stream.pages[page]) * page_size + offset
        elif span:
            tokens = np.arange(stream.stored_len, stream.stored_len + span, dtype=np.int64)
            slots[at : at + span] = stream.pages[tokens // page_size] * np.int64(page_size)
            slots[at : at + span] += tokens % page_size
        at += span
    return slots


def _leading_ones(spans: list[int]) -> int:
    for count, span in enumerate(spans):
        if span != 1:
            return count
    return len(spans)
