"""Attention of a segment's own tokens to each other and to a context in a paged cache, in full.

Nothing is written: what is seen of the step is gone with it. The segments of a step are its tokens'
layout; a segment's label names the stream that is its context, for which the step on the cache has a
segment of span 0. While neither changes, a plan is used again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from phalanx.device.base import DeviceBackend
from phalanx.errors import ConfigurationError
from phalanx.step.declaration import ResourceStep, Segment, StepContext
from phalanx.step.lease import BufferClaim
from phalanx.step.resources.base import BuildInfo, Resource, ResourceSpec
from phalanx.step.resources.kv_cache import KVCache
from phalanx.step.resources.kv_plan import KVPlan


@dataclass(frozen=True)
class JointAttentionSpec(ResourceSpec):
    """Declares attention to a step's own tokens and to streams of the cache `kv_cache`."""

    kv_cache: str

    def depends_on(self) -> frozenset[str]:
        return frozenset({self.kv_cache})

    def build(self, info: BuildInfo) -> JointAttention:
        cache = info.dependencies[self.kv_cache]
        assert isinstance(cache, KVCache)
        return JointAttention(self, cache, info.backend)


@dataclass(frozen=True)
class JointStep(ResourceStep):
    """Who attends: segments in the order of their tokens, each by the label of its context."""

    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class _Seen:
    """A segment and the context that it reads: equal ones have equal plans."""

    span: int
    length: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class _Group:
    """Segments of one length with contexts of one length, which share a call."""

    tokens: Tensor | slice
    """int64 [segments * span], or all tokens of the step."""
    context: Tensor
    """int64 [segments * length]: flat positions in the cache."""
    count: int
    span: int
    length: int


@dataclass(frozen=True)
class JointPlan:
    """The segments of a step, in groups."""

    num_tokens: int
    groups: tuple[_Group, ...]


class JointAttention(Resource):
    """See the module. The layer cursor is reset when a step begins.

    It is not captured: contexts differ in length from request to request, and a step is long enough
    to hide what its launches cost.
    """

    skips = False
    """What stands behind a token depends on the context too, not on the tokens alone."""

    def __init__(self, spec: JointAttentionSpec, cache: KVCache, backend: DeviceBackend) -> None:
        self.key = spec.key
        self._kv_key = spec.kv_cache
        self._cache = cache
        self._backend = backend
        self._known: tuple[list[_Seen], JointPlan] = ([], JointPlan(0, ()))
        self._plan = JointPlan(0, ())
        self._layer = 0

    def claim_buffers(self, claim: BufferClaim) -> None:
        raise ConfigurationError(
            f"joint attention {self.key!r} cannot be captured: its contexts have no fixed length; "
            "leave its node's walk out of capture_configs"
        )

    def plan(self, step: ResourceStep, ctx: StepContext) -> JointPlan:
        assert isinstance(step, JointStep)
        kv = ctx.plan_results[self._kv_key]
        assert isinstance(kv, KVPlan)
        seen = self._seen(step.segments, kv)
        known, plan = self._known
        if known != seen:
            plan = self._plan_of(seen)
            self._known = seen, plan
        return plan

    def begin(self, step: ResourceStep, ctx: StepContext) -> None:
        self._plan = ctx.plan_results[self.key]
        self._layer = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One layer: every token of `q` [T, H, D] attends to the context of its segment and to the
        keys and values [T, KV, D] of the segment itself, H a multiple of KV.

        The result is [T, H D]. Each call moves to the next layer.
        """
        if len(q) != self._plan.num_tokens:
            raise ConfigurationError(
                f"{len(q)} queries for the {self._plan.num_tokens} tokens that joint attention "
                f"{self.key!r} has been declared"
            )
        cached = [part.flatten(0, 1) for part in self._cache.layer(self._layer)]
        self._layer += 1
        mixed = q.new_empty(q.shape)
        for group in self._plan.groups:
            keys, values = (
                _behind(context[group.context], own[group.tokens], group)
                for context, own in zip(cached, (k, v), strict=True)
            )
            queries = q[group.tokens].reshape(group.count, group.span, *q.shape[1:]).transpose(1, 2)
            out = functional.scaled_dot_product_attention(
                queries, keys, values, enable_gqa=q.shape[1] != k.shape[1]
            )
            mixed[group.tokens] = out.transpose(1, 2).flatten(0, 1)
        return mixed.flatten(1)

    def _seen(self, segments: tuple[Segment, ...], kv: KVPlan) -> list[_Seen]:
        lengths = {
            (row.request_id, label): start + row.span
            for label, rows in kv.rows.items()
            for row, start in zip(rows, kv.starts[label], strict=True)
        }
        seen: list[_Seen] = []
        for segment in segments:
            rid, label = segment.request_id, segment.label
            length = lengths.get((rid, label))
            if length is None:
                raise ConfigurationError(
                    f"joint attention {self.key!r}: request {rid!r} has no segment {label!r} on "
                    f"{self._kv_key!r}; declare one of span 0 to read its context"
                )
            pages = self._cache.pages(rid, label, length).pages
            seen.append(_Seen(segment.span, length, pages))
        return seen

    def _plan_of(self, seen: list[_Seen]) -> JointPlan:
        members: dict[tuple[int, int], list[tuple[int, _Seen]]] = {}
        at = 0
        for one in seen:
            if one.span:
                members.setdefault((one.span, one.length), []).append((at, one))
            at += one.span
        page_size = self._cache.config.page_size
        groups: list[_Group] = []
        for (span, length), own in members.items():
            tokens: Tensor | slice = slice(0, at)
            if len(members) > 1:
                tokens = self._tokens([first for first, _ in own], span)
            slots = np.concatenate([_slots(one, page_size) for _, one in own])
            context = self._backend.upload(slots)
            groups.append(_Group(tokens, context, len(own), span, length))
        return JointPlan(at, tuple(groups))

    def _tokens(self, firsts: list[int], span: int) -> Tensor | slice:
        """A slice where one segment follows another, so that nothing need be gathered."""
        if firsts == list(range(firsts[0], firsts[0] + len(firsts) * span, span)):
            return slice(firsts[0], firsts[0] + len(firsts) * span)
        starts = np.array(firsts, dtype=np.int64)[:, None]
        return self._backend.upload((starts + np.arange(span)).reshape(-1))


def _slots(one: _Seen, page_size: int) -> NDArray[np.int64]:
    """Where the tokens of a context are, in order."""
    pages = np.array(one.pages, dtype=np.int64)[:, None]
    return (pages * page_size + np.arange(page_size)).reshape(-1)[: one.length]


def _behind(context: Tensor, own: Tensor, group: _Group) -> Tensor:
    """Each segment's context with its own tokens behind: [segments, KV, length + span, D]."""
    parts = [
        tokens.reshape(group.count, length, *tokens.shape[1:])
        for tokens, length in ((context, group.length), (own, group.span))
    ]
    return torch.cat(parts, dim=1).transpose(1, 2)
