"""From a step's segments to the addressing that attention reads: one `PagedPlan` a plan label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.device.base import DeviceBackend
from phalanx.device.operators.base import PagedPlan
from phalanx.step.declaration import Segment
from phalanx.step.resources.cache_stream import CacheStream
from phalanx.step.resources.kv_addressing import slots_of, table_of
from phalanx.step.resources.kv_fixed_plan import StaticTarget, fixed_plan
from phalanx.step.resources.kv_step import KVStep

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
    step: KVStep,
    streams: Streams,
    page_size: int,
    target: DeviceBackend | StaticTarget,
    copies: tuple[tuple[list[int], list[int]], ...] = (),
) -> KVPlan:
    """Plan every label of the step, and every combined label over its sources.

    A combined plan lists its source labels one after another, label by label; captured, each
    source has all rows of the bucket there.
    """
    by_label: dict[str, list[Segment]] = {}
    if isinstance(target, StaticTarget):
        by_label = {label: [] for label in step.labels}
    for segment in step.segments:
        by_label.setdefault(segment.label, []).append(segment)
    rows = {label: tuple(rows) for label, rows in by_label.items()}
    for name, sources in step.combined_labels.items():
        rows[name] = tuple(row for source in sources for row in rows.get(source, ()))
    plans: dict[str, PagedPlan] = {}
    starts: dict[str, tuple[int, ...]] = {}
    for label, group in rows.items():
        chosen = [streams[row.request_id][row.label] for row in group]
        starts[label] = tuple(stream.stored_len for stream in chosen)
        if isinstance(target, StaticTarget):
            sources = step.combined_labels.get(label, (label,))
            paired = [_paired(rows.get(source, ()), streams) for source in sources]
            plan = fixed_plan(label, paired, page_size, target)
        else:
            plan = _paged_plan([row.span for row in group], chosen, page_size, target)
        plans[label] = plan if step.causal else replace(plan, causal=False)
    return KVPlan(plans, rows, starts, copies)


def _paired(rows: Sequence[Segment], streams: Streams) -> list[tuple[Segment, CacheStream]]:
    return [(row, streams[row.request_id][row.label]) for row in rows]


def _paged_plan(
    spans: list[int], streams: list[CacheStream], page_size: int, backend: DeviceBackend
) -> PagedPlan:
    lens = [stream.stored_len + span for stream, span in zip(streams, spans, strict=True)]
    query_starts = np.zeros(len(spans) + 1, dtype=np.int32)
    np.cumsum(spans, out=query_starts[1:])
    return PagedPlan(
        slots=backend.upload(slots_of(spans, streams, page_size)),
        query_starts=backend.upload(query_starts),
        page_table=backend.upload(table_of(lens, streams, page_size)),
        kv_lens=backend.upload(np.array(lens, dtype=np.int32)),
        spans=tuple(spans),
        lens=tuple(lens),
        num_single=_leading_ones(spans),
    )


def _leading_ones(spans: list[int]) -> int:
    for count, span in enumerate(spans):
        if span != 1:
            return count
    return len(spans)
