"""Attention to a context: a stream of a second paged cache, written once and read by many steps.

The context's segments are declared on that cache, of span 0 where a step only reads. Its plan says
which pages to read; the rows of this step say who asks. While neither changes, a plan is used again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from phalanx.device.base import DeviceBackend
from phalanx.device.operators.base import Operators, PagedPlan
from phalanx.errors import ConfigurationError
from phalanx.step.declaration import DEFAULT_LABEL, ResourceStep, Segment, StepContext
from phalanx.step.lease import SlotLease
from phalanx.step.resources.base import BuildInfo, Resource, ResourceSpec
from phalanx.step.resources.kv_cache import KVCache
from phalanx.step.resources.kv_plan import KVPlan
from phalanx.step.resources.layout import rows_by_label
from phalanx.step.resources.page_pool import SINK_PAGE

CONTEXT_LABEL = "context"


@dataclass(frozen=True)
class CrossAttentionSpec(ResourceSpec):
    """Declares attention to the streams `context_label` of the cache `kv_cache`."""

    kv_cache: str
    operators: Operators
    context_label: str = CONTEXT_LABEL

    def depends_on(self) -> frozenset[str]:
        return frozenset({self.kv_cache})

    def build(self, info: BuildInfo) -> CrossAttention:
        cache = info.dependencies[self.kv_cache]
        assert isinstance(cache, KVCache)
        return CrossAttention(self, cache, info.backend)


@dataclass(frozen=True)
class CrossAttentionStep(ResourceStep):
    """Who asks: the query tokens of each row, in layout order; none where a step only writes.

    Queries of a label named in `contexts` read another stream than the resource's own. Combined
    labels are as on a cache.
    """

    segments: tuple[Segment, ...] = ()
    contexts: Mapping[str, str] = field(default_factory=dict)
    combined_labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class ContextPlan:
    """One label's queries. `answered` is False for tokens whose context is empty, or None where
    there are none: they read the sink and get zeros.
    """

    paged: PagedPlan
    answered: Tensor | None


@dataclass(frozen=True)
class CrossPlan:
    """The plans of a step by label, and where its new context tokens are written, by the stream's
    label.
    """

    by_label: Mapping[str, ContextPlan]
    slots: Mapping[str, Tensor]
    contexts: Mapping[str, str]


@dataclass(frozen=True)
class _Row:
    """One row of queries and the context that it reads: equal rows have equal plans."""

    request_id: str
    span: int
    length: int
    generation: int
    pages: tuple[int, ...]


_Key = tuple[int | None, str]
"""(lease slot, label)."""


class CrossAttention(Resource):
    """See the module. The label cursor and both layer cursors are reset when a step begins."""

    skips = False
    """What stands behind a token depends on the context too, not on the tokens alone."""

    def __init__(self, spec: CrossAttentionSpec, cache: KVCache, backend: DeviceBackend) -> None:
        self.key = spec.key
        self._spec = spec
        self._cache = cache
        self._backend = backend
        self._scale = 1.0 / math.sqrt(cache.config.head_dim)
        self._known: dict[_Key, tuple[SlotLease | None, list[_Row], ContextPlan]] = {}
        self._plan = CrossPlan({}, {}, {})
        self._label = DEFAULT_LABEL
        self._asked = self._written = 0

    def plan(self, step: ResourceStep, ctx: StepContext) -> CrossPlan:
        assert isinstance(step, CrossAttentionStep)
        kv = ctx.plan_results[self._spec.kv_cache]
        assert isinstance(kv, KVPlan)
        groups = rows_by_label(step.segments, step.combined_labels)
        by_label: dict[str, ContextPlan] = {}
        for label, segments in groups.items():
            rows = self._rows(segments, step.contexts, kv)
            known = self._known.get((None, label))
            if known is None or known[1] != rows:
                known = ctx.lease, rows, _context_plan(rows, self._backend)
                self._known[None, label] = known
            by_label[label] = known[2]
        slots = {label: plan.slots for label, plan in kv.by_label.items()}
        return CrossPlan(by_label, slots, step.contexts)

    def begin(self, step: ResourceStep, ctx: StepContext) -> None:
        self._plan = ctx.plan_results[self.key]
        self.select(DEFAULT_LABEL)

    def select(self, label: str) -> None:
        """Go on with the queries of `label`, from the first layer."""
        self._label = label
        self._asked = self._written = 0

    def write(self, keys: Tensor, values: Tensor) -> None:
        """One layer's keys and values of the step's new context tokens, each [tokens, KV, D].

        Each call moves to the next layer, apart from what `attend` does.
        """
        context = self._plan.contexts.get(self._label, self._spec.context_label)
        slots = self._plan.slots[context]
        cache = self._cache.layer(self._written)
        self._written += 1
        for part, new in zip(cache, (keys, values), strict=True):
            part.flatten(0, 1).index_copy_(0, slots, new)

    def attend(self, q: Tensor) -> Tensor:
        """One layer: every token of `q` [T, H, D] attends to the whole context of its row.

        The result is [T, H D]. Each call moves to the next layer.
        """
        plan = self._plan.by_label[self._label]
        cache = self._cache.layer(self._asked)
        self._asked += 1
        mixed = self._spec.operators.paged_attention(q, cache, plan.paged, self._scale)
        if plan.answered is None:
            return mixed
        return torch.where(plan.answered[:, None], mixed, torch.zeros_like(mixed))

    def _rows(
        self, segments: Sequence[Segment], contexts: Mapping[str, str], kv: KVPlan
    ) -> list[_Row]:
        places = {
            label: {row.request_id: at for at, row in enumerate(rows)}
            for label, rows in kv.rows.items()
        }
        rows: list[_Row] = []
        for segment in segments:
            rid = segment.request_id
            label = contexts.get(segment.label, self._spec.context_label)
            place = places.get(label, {}).get(rid)
            if place is None:
                raise ConfigurationError(
                    f"cross-attention {self.key!r}: request {rid!r} has no segment {label!r} on "
                    f"{self._spec.kv_cache!r}; declare one of span 0 to read its context"
                )
            length = kv.by_label[label].lens[place]
            seen = self._cache.pages(rid, label, length)
            rows.append(_Row(rid, segment.span, length, seen.generation, seen.pages))
        return rows


def _context_plan(rows: Sequence[_Row], backend: DeviceBackend) -> ContextPlan:
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
