"""The paged key-value cache: pages of a pool, given to (request, label) streams as they grow.

Storage is one pair of tensors a layer, `[num_pages + 1, page_size, kv_heads, head_dim]`. Methods
that touch the maps of streams hold one lock, since removal and admission may come from two threads.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx.step.declaration import DEFAULT_LABEL, Fork, ResourceStep, Segment, StepContext
from phalanx.step.outcomes import ADMITTED, AdmitOutcome, AdmitRuntimeError, AllocationFailed
from phalanx.step.resources.base import (
    BuildInfo,
    Growing,
    Resource,
    ResourceConfig,
    ResourceSpec,
)
from phalanx.step.resources.cache_stream import CacheStream
from phalanx.step.resources.kv_plan import KVPlan, build_plans
from phalanx.step.resources.page_pool import PagePool

KV_TAG = "kv_cache"


@dataclass(frozen=True)
class KVConfig:
    """Geometry of the cache. `num_pages` does not count the sink page."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_pages: int
    page_size: int
    max_seq_len: int
    dtype: torch.dtype


@dataclass(frozen=True)
class KVSpec(ResourceSpec):
    """Declares a paged key-value cache."""

    config: KVConfig

    def build(self, info: BuildInfo) -> KVCache:
        return KVCache(self.key, self.config, info)


@dataclass(frozen=True)
class KVStep(ResourceStep):
    """What a step does to the cache.

    `commit=False` reserves, plans and writes, but lengths do not move (a denoising step reads its
    own tokens and leaves none behind). `combined_labels` names plans over several streams of a
    request, one after another: `{"guided": ("prompt", "image")}`. `pre_forks` are copied before
    the forward, `post_forks` after it with the step's tokens in; whole pages are copied, not shared.
    """

    segments: tuple[Segment, ...]
    commit: bool = True
    combined_labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    pre_forks: tuple[Fork, ...] = ()
    post_forks: tuple[Fork, ...] = ()


@dataclass
class _Reservation:
    """What one context took: the streams it touched, with their pages and lengths before."""

    touched: list[CacheStream] = field(default_factory=list)
    grown: list[tuple[CacheStream, int]] = field(default_factory=list)
    forked: list[tuple[CacheStream, int]] = field(default_factory=list)
    invented: list[tuple[str, str]] = field(default_factory=list)


class KVCache(Resource, Growing):
    """See the module. `layer(i)` is the (key, value) storage that operators read and write."""

    def __init__(self, key: str, config: KVConfig, info: BuildInfo) -> None:
        self.key = key
        self.config = config
        self._backend = info.backend
        self._lock = threading.RLock()
        self._pool = PagePool(config.num_pages)
        self._streams: dict[str, dict[str, CacheStream]] = {}
        self._layers = self._allocated()

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer."""
        return self._layers[index]

    @property
    def num_free_pages(self) -> int:
        return self._pool.num_free

    @property
    def used_tokens(self) -> int:
        """Tokens' worth of pages that requests hold."""
        return (self._pool.num_pages - self._pool.num_free) * self.config.page_size

    def stored_len(self, rid: str, label: str = DEFAULT_LABEL) -> int:
        """Committed tokens of a stream; 0 for one that does not exist."""
        with self._lock:
            stream = self._streams.get(rid, {}).get(label)
            return 0 if stream is None else stream.stored_len

    def ingest_request(self, rid: str, config: ResourceConfig | None) -> None:
        with self._lock:
            self._streams.setdefault(rid, {})

    def remove_request(self, rid: str) -> None:
        with self._lock:
            for stream in self._streams.pop(rid, {}).values():
                self._pool.give_back(stream.cut(0))

    def fits(self, totals: Mapping[str, int]) -> bool:
        with self._lock:
            wanted = sum(
                max(0, self._pages_for(total) - self._held_pages(rid))
                for rid, total in totals.items()
            )
            return wanted <= self._pool.num_free

    def admit(self, step: ResourceStep, ctx: StepContext) -> AdmitOutcome:
        assert isinstance(step, KVStep)
        with self._lock:
            self.unadmit(step, ctx)
            refusal = self._refusal(step)
            if refusal is not None:
                return AdmitOutcome(ok=False, reason=refusal)
            self._reserve(step, ctx)
            return ADMITTED

    def unadmit(self, step: ResourceStep, ctx: StepContext) -> None:
        with self._lock:
            taken = ctx.reservations.pop(self.key, None)
            if taken is None:
                return
            assert isinstance(taken, _Reservation)
            for stream, num_pages in taken.grown:
                self._pool.give_back(stream.cut(num_pages))
            for stream, stored_len in taken.forked:
                stream.stored_len = stored_len
            for rid, label in taken.invented:
                self._streams.get(rid, {}).pop(label, None)
            for stream in taken.touched:
                stream.step_in_flight = False

    def plan(self, step: ResourceStep, ctx: StepContext) -> KVPlan:
        assert isinstance(step, KVStep)
        with self._lock:
            for fork in step.pre_forks:
                self._copy_stream(fork)
            return build_plans(
                step.segments,
                step.combined_labels,
                self._streams,
                self.config.page_size,
                self._backend,
            )

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        assert isinstance(step, KVStep)
        with self._lock:
            taken = ctx.reservations.pop(self.key, None)
            if taken is not None:
                for stream in taken.touched:
                    stream.step_in_flight = False
            if step.commit:
                for segment in step.segments:
                    stream = self._streams[segment.request_id][segment.label]
                    if segment.span:
                        stream.stored_len += segment.span
                        stream.generation += 1
            for fork in step.post_forks:
                self._copy_stream(fork)

    def publish(self, rid: str) -> dict[str, int]:
        """Committed tokens by label."""
        with self._lock:
            return {
                label: stream.stored_len for label, stream in self._streams.get(rid, {}).items()
            }

    def release(self, tags: frozenset[str]) -> None:
        if KV_TAG not in tags or self._released:
            return
        assert self.at_rest(), "the cache is released only when no request holds any of it"
        self._layers = ()
        self._backend.release_cached_memory()

    def restore(self, tags: frozenset[str]) -> None:
        if KV_TAG in tags and self._released:
            self._layers = self._allocated()

    def at_rest(self) -> bool:
        with self._lock:
            return not self._streams and self._pool.num_free == self._pool.num_pages

    @property
    def _released(self) -> bool:
        return not self._layers

    def _allocated(self) -> tuple[tuple[Tensor, Tensor], ...]:
        config, zeros = self.config, self._backend.zeros
        shape = (
            config.num_pages + 1,
            config.page_size,
            config.num_kv_heads,
            config.head_dim,
        )
        return tuple(
            (zeros(shape, config.dtype), zeros(shape, config.dtype))
            for _ in range(config.num_layers)
        )

    def _tensors(self) -> list[Tensor]:
        return [tensor for pair in self._layers for tensor in pair]

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.config.page_size)

    def _held_pages(self, rid: str) -> int:
        return sum(stream.num_pages for stream in self._streams.get(rid, {}).values())

    def _stream(self, rid: str, label: str) -> CacheStream | None:
        return self._streams[rid].get(label)

    def _targets(self, step: KVStep) -> dict[tuple[str, str], int]:
        """Every stream that the step grows, with the number of tokens that it must then hold."""
        lengths: dict[tuple[str, str], int] = {}

        def length(rid: str, label: str) -> int:
            known = lengths.get((rid, label))
            if known is not None:
                return known
            stream = self._stream(rid, label)
            return 0 if stream is None else stream.stored_len

        for fork in step.pre_forks:
            lengths[fork.request_id, fork.target] = length(fork.request_id, fork.source)
        for segment in step.segments:
            key = (segment.request_id, segment.label)
            lengths[key] = length(*key) + segment.span
        for fork in step.post_forks:
            lengths[fork.request_id, fork.target] = length(fork.request_id, fork.source)
        return lengths

    def _refusal(self, step: KVStep) -> AllocationFailed | AdmitRuntimeError | None:
        if self._released:
            return AdmitRuntimeError(f"cache {self.key!r} is released; restore it first")
        wanted = 0
        last = ("", DEFAULT_LABEL)
        for (rid, label), total in self._targets(step).items():
            if total > self.config.max_seq_len:
                return AdmitRuntimeError(
                    f"{total} tokens exceed the cache's sequence limit {self.config.max_seq_len}",
                    rid,
                )
            stream = self._stream(rid, label)
            held = 0 if stream is None else stream.num_pages
            short = self._pages_for(total) - held
            if short > 0:
                wanted, last = wanted + short, (rid, label)
        missing = wanted - self._pool.num_free
        if missing <= 0:
            return None
        return AllocationFailed(
            f"{wanted} pages wanted, {self._pool.num_free} free", missing, last[0], last[1]
        )

    def _reserve(self, step: KVStep, ctx: StepContext) -> None:
        taken = ctx.reservations[self.key] = _Reservation()
        for (rid, label), total in self._targets(step).items():
            stream = self._stream(rid, label)
            if stream is None:
                stream = self._streams[rid][label] = CacheStream()
                taken.invented.append((rid, label))
            short = self._pages_for(total) - stream.num_pages
            if short > 0:
                taken.grown.append((stream, stream.num_pages))
                stream.append(self._pool.take(short))
            stream.step_in_flight = True
            taken.touched.append(stream)
        for fork in step.pre_forks:
            target = self._streams[fork.request_id][fork.target]
            taken.forked.append((target, target.stored_len))

    def _copy_stream(self, fork: Fork) -> None:
        streams = self._streams[fork.request_id]
        source, target = streams[fork.source], streams[fork.target]
        count = self._pages_for(source.stored_len)
        if count:
            to = torch.from_numpy(target.pages[:count].astype("int64")).to(self._backend.device)
            origin = torch.from_numpy(source.pages[:count].astype("int64")).to(to.device)
            for tensor in self._tensors():
                tensor[to] = tensor[origin]
        target.stored_len = source.stored_len
        target.generation += 1
