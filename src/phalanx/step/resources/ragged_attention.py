"""Attention without a cache: the tokens of each segment attend to each other, and to nobody else.

The segments are the whole layout; a label that they do not name has no plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from phalanx.device.base import DeviceBackend
from phalanx.errors import ConfigurationError
from phalanx.step.declaration import DEFAULT_LABEL, ResourceStep, Segment, StepContext
from phalanx.step.lease import BufferClaim, SlotLease
from phalanx.step.resources.base import BuildInfo, Resource, ResourceSpec
from phalanx.step.resources.layout import rows_by_label
from phalanx.step.resources.slot_buffers import SlotBuffers


@dataclass(frozen=True)
class RaggedAttentionSpec(ResourceSpec):
    """Declares attention within segments; `causal` if no token sees later ones of its segment."""

    causal: bool = False

    def build(self, info: BuildInfo) -> RaggedAttention:
        return RaggedAttention(self, info.backend)


@dataclass(frozen=True)
class RaggedStep(ResourceStep):
    """The sequences of a step; a request may have several. The rest is as in a step on a cache."""

    segments: tuple[Segment, ...]
    combined_labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    labels: tuple[str, ...] = (DEFAULT_LABEL,)


@dataclass(frozen=True)
class _Group:
    """Sequences of one length, which share a call."""

    tokens: Tensor | slice
    """int64 [sequences * length], or all tokens of the label."""
    length: int


@dataclass(frozen=True)
class RaggedPlan:
    """One label's sequences: in groups of equal length, or, where a packed shape is captured, the
    sequence of every token (-1 for padding).
    """

    num_tokens: int
    groups: tuple[_Group, ...]
    sequence_ids: Tensor | None = None
    """int32 [tokens]."""


class RaggedAttention(Resource):
    """See the module. The label cursor is reset when a step begins."""

    def __init__(self, spec: RaggedAttentionSpec, backend: DeviceBackend) -> None:
        self.key = spec.key
        self._causal = spec.causal
        self._backend = backend
        self._buffers = SlotBuffers(backend)
        self._plans: Mapping[str, RaggedPlan] = {}
        self._label = DEFAULT_LABEL

    def plan(self, step: ResourceStep, ctx: StepContext) -> Mapping[str, RaggedPlan]:
        assert isinstance(step, RaggedStep)
        always = () if ctx.lease is None else step.labels
        groups = rows_by_label(step.segments, step.combined_labels, always)
        if ctx.lease is None:
            return {label: self._plan_of(rows) for label, rows in groups.items()}
        return {
            label: self._fixed_plan(
                label, rows, len(step.combined_labels.get(label, (label,))), ctx.lease
            )
            for label, rows in groups.items()
        }

    def claim_buffers(self, claim: BufferClaim) -> None:
        self._buffers.claim(claim)

    def begin(self, step: ResourceStep, ctx: StepContext) -> None:
        self._plans = ctx.plan_results[self.key]
        self.select(DEFAULT_LABEL)

    def select(self, label: str) -> None:
        """Go on with the sequences of `label`."""
        self._label = label

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of `q` [T, H, D] to `k` and `v` [T, KV, D], H a multiple of KV.

        The result is [T, H D]. Raises `ConfigurationError` for a label that the step did not
        declare.
        """
        plan = self._plans.get(self._label)
        if plan is None:
            raise ConfigurationError(
                f"ragged attention {self.key!r} has no sequences of label {self._label!r}; the "
                f"step declared {sorted(self._plans)}"
            )
        if len(q) != plan.num_tokens:
            raise ConfigurationError(
                f"{len(q)} queries for {plan.num_tokens} declared tokens of label {self._label!r}"
            )
        if plan.sequence_ids is not None:
            return self._attend_masked(q, k, v, plan.sequence_ids)
        mixed = torch.empty_like(q)
        for group in plan.groups:
            queries, keys, values = (
                _sequences(part[group.tokens], group.length) for part in (q, k, v)
            )
            shares = q.shape[1] != k.shape[1]
            out = functional.scaled_dot_product_attention(
                queries, keys, values, is_causal=self._causal, enable_gqa=shares
            )
            mixed[group.tokens] = out.transpose(1, 2).flatten(0, 1)
        return mixed.flatten(1)

    def _attend_masked(self, q: Tensor, k: Tensor, v: Tensor, sequence_ids: Tensor) -> Tensor:
        visible = sequence_ids[:, None] == sequence_ids
        if self._causal:
            visible = visible.tril()
        queries, keys, values = (_sequences(part, len(part)) for part in (q, k, v))
        out = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=visible, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).flatten(0, 1).flatten(1)

    def _fixed_plan(
        self, label: str, rows: tuple[Segment, ...], times: int, lease: SlotLease
    ) -> RaggedPlan:
        """A captured step's plan: rows of one length need none, others a mask."""
        bucket, spans = lease.bucket, [row.span for row in rows]
        if bucket.packed and times == 1:
            ids = np.repeat(np.arange(len(spans), dtype=np.int32), spans)
            filled = self._buffers.tokens(lease, f"{label}.sequences", ids, -1)
            return RaggedPlan(bucket.tokens, (), filled)
        row_span = bucket.tokens // bucket.rows
        if bucket.packed or any(span != row_span for span in spans):
            raise ConfigurationError(
                f"ragged attention {self.key!r}: label {label!r} has sequences of {spans} tokens in "
                f"a capture of walk {bucket.walk!r}; a batched one takes one of {row_span} tokens a "
                "row, a packed one no combined labels"
            )
        tokens = times * bucket.tokens
        return RaggedPlan(tokens, (_Group(slice(0, tokens), row_span),))

    def _plan_of(self, rows: tuple[Segment, ...]) -> RaggedPlan:
        starts: dict[int, list[int]] = {}
        at = 0
        for row in rows:
            if row.span:
                starts.setdefault(row.span, []).append(at)
            at += row.span
        if len(starts) == 1:
            return RaggedPlan(at, (_Group(slice(0, at), next(iter(starts))),))
        groups = [
            _Group(self._backend.upload(_tokens(firsts, length)), length)
            for length, firsts in starts.items()
        ]
        return RaggedPlan(at, tuple(groups))


def _tokens(firsts: list[int], length: int) -> NDArray[np.int64]:
    return (np.array(firsts, dtype=np.int64)[:, None] + np.arange(length)).reshape(-1)


def _sequences(tokens: Tensor, length: int) -> Tensor:
    """[sequences * length, heads, D] as [sequences, heads, length, D]."""
    return tokens.reshape(-1, length, *tokens.shape[1:]).transpose(1, 2)
