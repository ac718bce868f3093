"""A cache of a few small pages, and what a test writes to it and reads from it."""

from __future__ import annotations

import torch

from phalanx.device.base import DeviceBackend
from phalanx.device.cpu import CpuBackend
from phalanx.step.declaration import Segment, StepContext
from phalanx.step.resources.base import BuildInfo
from phalanx.step.resources.host_pages import HostPages
from phalanx.step.resources.kv_cache import KVCache, KVConfig, KVStep

LAYERS, PAGE = 2, 4


def make_cache(
    num_pages: int = 8,
    *,
    max_seq_len: int = 1000,
    page_size: int = PAGE,
    host_pages: int = 0,
    prefix_cache: bool = True,
    make_host: type[HostPages] = HostPages,
    backend: DeviceBackend | None = None,
) -> KVCache:
    config = KVConfig(
        num_layers=LAYERS,
        num_kv_heads=1,
        head_dim=2,
        num_pages=num_pages,
        page_size=page_size,
        max_seq_len=max_seq_len,
        dtype=torch.float32,
        host_pages=host_pages,
        prefix_cache=prefix_cache,
    )
    return KVCache("kv", config, BuildInfo(backend or CpuBackend()), make_host)


def kv_step(*segments: tuple[str, int] | tuple[str, int, str], **options) -> KVStep:
    return KVStep(tuple(Segment(*segment) for segment in segments), **options)


def context(*rids: str) -> StepContext:
    return StepContext(rids, "walk")


def write(cache: KVCache, plan, value: float) -> None:
    """Store `value`, `value + 1`, ... as the new tokens of a plan, in every layer."""
    count = len(plan.slots)
    values = value + torch.arange(count, dtype=torch.float32)
    for layer in range(LAYERS):
        keys, vals = cache.layer(layer)
        keys.flatten(0, 1)[plan.slots] = (values + 100 * layer)[:, None, None]
        vals.flatten(0, 1)[plan.slots] = -(values + 100 * layer)[:, None, None]


def stored(cache: KVCache, rid: str, label: str = "main") -> list[float]:
    """The tokens of a stream as a reading plan sees them; equal in all layers, keys and values."""
    step = kv_step((rid, 0, label))
    ctx = context(rid)
    assert cache.admit(step, ctx).ok
    plan = cache.plan(step, ctx).by_label[label]
    cache.unadmit(step, ctx)
    page_size = cache.config.page_size
    slots = plan.page_table[0].long()[:, None] * page_size + torch.arange(page_size)
    slots = slots.flatten()[: plan.lens[0]]
    keys = cache.layer(0)[0].flatten(0, 1)[slots, 0, 0]
    for layer in range(LAYERS):
        for part, sign in zip(cache.layer(layer), (1, -1), strict=True):
            assert torch.equal(sign * part.flatten(0, 1)[slots, 0, 1] - 100 * layer, keys)
    return keys.tolist()


def planned(cache: KVCache, step: KVStep, ctx: StepContext):
    """The plan of an admitted step, which is about to be computed."""
    plan = ctx.plan_results[cache.key] = cache.plan(step, ctx)
    cache.begin(step, ctx)
    return plan


def run(cache: KVCache, step: KVStep, value: float = 0.0, label: str = "main"):
    """One whole step that writes from `value` on; returns the plan."""
    ctx = context(*{segment.request_id for segment in step.segments})
    assert cache.admit(step, ctx).ok
    plan = planned(cache, step, ctx)
    if label in plan.by_label:
        write(cache, plan.by_label[label], value)
    cache.commit(step, ctx)
    return plan


def lengths(cache: KVCache, rid: str) -> dict[str, int]:
    """Committed tokens by label, as published."""
    return {label: stream.length for label, stream in cache.publish(rid).ranks[0].items()}


def in_flight(cache: KVCache) -> list[tuple[str, str]]:
    return [
        (rid, label)
        for rid, streams in cache._table.streams.items()
        for label, stream in streams.items()
        if stream.step_in_flight
    ]
