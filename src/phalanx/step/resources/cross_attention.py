"""Attention to a context: a stream of a second paged cache, written once and read by many steps.

The context's segments are declared on that cache, of span 0 where a step only reads. Its plan says
which pages to read; the rows of this step say who asks. While neither changes, a plan is used again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from phalanx.device.base import DeviceBackend
from phalanx.device.operators.base import Operators
from phalanx.errors import ConfigurationError
from phalanx.step.declaration import DEFAULT_LABEL, ResourceStep, Segment, StepContext
from phalanx.step.lease import BufferClaim, SlotLease
from phalanx.step.resources.base import BuildInfo, Resource, ResourceSpec
from phalanx.step.resources.context_plan import (
    ContextPlan,
    ContextRow,
    context_plan,
    fixed_context_plan,
)
from phalanx.step.resources.kv_cache import KVCache
from phalanx.step.resources.kv_plan import KVPlan
from phalanx.step.resources.layout import rows_by_label
from phalanx.step.resources.slot_buffers import SlotBuffers

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

    Queries of a label named in `contexts` read another stream than the resource's own. The rest is
    as in a step on the cache.
    """

    segments: tuple[Segment, ...] = ()
    contexts: Mapping[str, str] = field(default_factory=dict)
    combined_labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    labels: tuple[str, ...] = (DEFAULT_LABEL,)
    max_context: int | None = None


@dataclass(frozen=True)
class CrossPlan:
    """The plans of a step by label, and where its new context tokens are written, by the stream's
    label.
    """

    by_label: Mapping[str, ContextPlan]
    slots: Mapping[str, Tensor]
    contexts: Mapping[str, str]


_Key = tuple[int | None, str]
"""(lease slot, label)."""
_Fingerprint = tuple[SlotLease | None, int | None, list[list[ContextRow]]]


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
        self._buffers = SlotBuffers(backend)
        self._known: dict[_Key, tuple[_Fingerprint, ContextPlan]] = {}
        self._plan = CrossPlan({}, {}, {})
        self._label = DEFAULT_LABEL
        self._asked = self._written = 0

    def plan(self, step: ResourceStep, ctx: StepContext) -> CrossPlan:
        assert isinstance(step, CrossAttentionStep)
        kv = ctx.plan_results[self._spec.kv_cache]
        assert isinstance(kv, KVPlan)
        always = () if ctx.lease is None else step.labels
        groups = rows_by_label(step.segments, step.combined_labels, always)
        by_label = {
            label: self._planned(
                label,
                [
                    self._rows(groups.get(source, ()), step.contexts, kv)
                    for source in step.combined_labels.get(label, (label,))
                ],
                step,
                ctx.lease,
            )
            for label in groups
        }
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

    def _planned(
        self,
        label: str,
        sources: list[list[ContextRow]],
        step: CrossAttentionStep,
        lease: SlotLease | None,
    ) -> ContextPlan:
        """The plan of a label's rows; the last one again if nothing of them has changed."""
        key = None if lease is None else lease.slot, label
        fingerprint = lease, step.max_context, sources
        known = self._known.get(key)
        if known is not None and known[0] == fingerprint:
            # What operators keep of a plan is part of one capture: each has an object of its own.
            return known[1] if lease is None else replace(known[1], paged=replace(known[1].paged))
        if lease is None:
            plan = context_plan([row for rows in sources for row in rows], self._backend)
        else:
            config = self._cache.config
            tokens = config.max_seq_len if step.max_context is None else step.max_context
            num_pages = config.pages_for(tokens)
            plan = fixed_context_plan(label, sources, lease, self._buffers, num_pages)
        self._known[key] = fingerprint, plan
        return plan

    def claim_buffers(self, claim: BufferClaim) -> None:
        operators = self._spec.operators
        if not operators.capturable:
            raise ConfigurationError(
                f"cross-attention {self.key!r} uses {operators.name} operators, which cannot be "
                "captured; give it TorchOperators, or do not capture"
            )
        self._buffers.claim(claim)

    def _rows(
        self, segments: Sequence[Segment], contexts: Mapping[str, str], kv: KVPlan
    ) -> list[ContextRow]:
        places = {
            label: {row.request_id: at for at, row in enumerate(rows)}
            for label, rows in kv.rows.items()
        }
        rows: list[ContextRow] = []
        for segment in segments:
            rid = segment.request_id
            label = contexts.get(segment.label, self._spec.context_label)
            place = places.get(label, {}).get(rid)
            if place is None:
                raise ConfigurationError(
                    f"cross-attention {self.key!r}: request {rid!r} has no segment {label!r} on "
                    f"{self._spec.kv_cache!r}; declare one of span 0 to read its context"
                )
            length = kv.starts[label][place] + kv.rows[label][place].span
            seen = self._cache.pages(rid, label, length)
            rows.append(ContextRow(rid, segment.span, length, seen.generation, seen.pages))
        return rows
