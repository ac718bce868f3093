"""Attention over a paged cache: it reads the cache's plan and walks the layers by a cursor."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from phalanx.device.operators.base import HeadLayout, Operators, PagedPlan
from phalanx.errors import ConfigurationError
from phalanx.step.declaration import DEFAULT_LABEL, ResourceStep, StepContext
from phalanx.step.lease import BufferClaim
from phalanx.step.resources.base import BuildInfo, Resource, ResourceSpec
from phalanx.step.resources.kv_cache import KVCache
from phalanx.step.resources.kv_plan import KVPlan


@dataclass(frozen=True)
class AttentionSpec(ResourceSpec):
    """Declares attention over the cache `kv_cache` through `operators`."""

    kv_cache: str
    operators: Operators

    def depends_on(self) -> frozenset[str]:
        return frozenset({self.kv_cache})

    def build(self, info: BuildInfo) -> PagedAttention:
        cache = info.dependencies[self.kv_cache]
        assert isinstance(cache, KVCache)
        return PagedAttention(self.key, self.kv_cache, cache, self.operators)


@dataclass(frozen=True)
class AttentionStep(ResourceStep):
    """Attention by the cache's plan; nothing else to say."""


class PagedAttention(Resource):
    """See the module. The label cursor and the layer cursor are reset when a step begins, so that a
    stack of layers passes neither.
    """

    def __init__(self, key: str, kv_key: str, cache: KVCache, operators: Operators) -> None:
        self.key = key
        self._kv_key = kv_key
        self._cache = cache
        self._operators = operators
        self._scale = 1.0 / math.sqrt(cache.config.head_dim)
        self._plan = KVPlan({}, {}, {})
        self._label = DEFAULT_LABEL
        self._layer = 0

    def claim_buffers(self, claim: BufferClaim) -> None:
        if not self._operators.capturable:
            raise ConfigurationError(
                f"attention {self.key!r} uses {self._operators.name} operators, which cannot be "
                "captured; use native_operators='off', or do not capture"
            )

    def plan(self, step: ResourceStep, ctx: StepContext) -> KVPlan:
        plan = ctx.plan_results[self._kv_key]
        assert isinstance(plan, KVPlan)
        return plan

    def begin(self, step: ResourceStep, ctx: StepContext) -> None:
        self._plan = ctx.plan_results[self.key]
        self.select(DEFAULT_LABEL)

    def select(self, label: str) -> None:
        """Go on with the plan of `label`, from the first layer."""
        self._label = label
        self._layer = 0

    def attend(self, qkv: Tensor, heads: HeadLayout, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """One layer: write the step's keys and values, then attend.

        `qkv` is [T, (H + 2 KV) D], `rotary` (cos, sin) as float32 [T, D / 2]; the result is
        [T, H D]. Each call moves the cursor to the next layer.
        """
        plan: PagedPlan = self._plan.by_label[self._label]
        cache = self._cache.layer(self._layer)
        q = self.write(qkv, heads, rotary)
        return self._operators.paged_attention(q, cache, plan, self._scale)

    def write(self, qkv: Tensor, heads: HeadLayout, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """One layer whose output nobody reads: write the step's keys and values.

        The result are the rotated queries, [T, H, D], of which `heads` may have none.
        """
        plan: PagedPlan = self._plan.by_label[self._label]
        cache = self._cache.layer(self._layer)
        self._layer += 1
        return self._operators.rope_and_write(qkv, heads, rotary, cache, plan.slots)
