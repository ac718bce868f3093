"""The paged key-value cache: pages of a pool, given to (request, label) streams as they grow.

Its methods hold one lock, since removal and admission may come from two threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from phalanx.device.base import DeviceBackend
from phalanx.schema.handoff import PublishedKV
from phalanx.step.declaration import DEFAULT_LABEL, ResourceStep, StepContext
from phalanx.step.lease import BufferClaim, SlotLease
from phalanx.step.outcomes import ADMITTED, AdmitOutcome, AdmitRuntimeError
from phalanx.step.resources.base import (
    BuildInfo,
    Evictable,
    Growing,
    Prefixed,
    Resource,
    ResourceConfig,
    ResourceSpec,
)
from phalanx.step.resources.host_pages import HostPages
from phalanx.step.resources.kv_fixed_plan import StaticTarget
from phalanx.step.resources.kv_offload import KVOffload
from phalanx.step.resources.kv_plan import KVPlan, build_plans
from phalanx.step.resources.kv_step import KVConfig, KVRequestConfig, KVStep
from phalanx.step.resources.kv_storage import KVStorage
from phalanx.step.resources.kv_streams import Reservation, StreamTable
from phalanx.step.resources.kv_transfer import CacheParts, KVTransfer, TransferSpec
from phalanx.step.resources.page_pool import PagePool
from phalanx.step.resources.prefix_index import PrefixIndex
from phalanx.step.resources.prefix_sharing import PrefixSharing
from phalanx.step.resources.slot_buffers import SlotBuffers
from phalanx.step.transfer.base import Ending

__all__ = ["KV_TAG", "KVCache", "KVConfig", "KVRequestConfig", "KVSpec", "KVStep", "TransferSpec"]

KV_TAG = "kv_cache"


@dataclass(frozen=True)
class KVSpec(ResourceSpec):
    """Declares a paged key-value cache."""

    config: KVConfig
    transfer: TransferSpec | None = None

    def build(self, info: BuildInfo) -> KVCache:
        return KVCache(self.key, self.config, info, transfer=self.transfer)


@dataclass(frozen=True)
class StreamPages:
    """Where some tokens of a stream are; `generation` tells whether they are still the same."""

    generation: int
    pages: tuple[int, ...]


class KVCache(Resource, Growing, Evictable, Prefixed):
    """See the module. `layer(i)` is the (key, value) storage that operators read and write."""

    def __init__(
        self,
        key: str,
        config: KVConfig,
        info: BuildInfo,
        make_host: Callable[[KVConfig, KVStorage, DeviceBackend], HostPages] = HostPages,
        transfer: TransferSpec | None = None,
    ) -> None:
        self.key = key
        self.config = config
        self._backend = info.backend
        self._lock = threading.RLock()
        index = PrefixIndex()
        self._pool = PagePool(config.num_pages, index)
        self._table = StreamTable(config, self._pool)
        self._sharing = PrefixSharing(config, self._table, self._pool, index)
        self._storage = KVStorage(config, info.backend)
        self._buffers = SlotBuffers(info.backend)
        self._host = make_host(config, self._storage, info.backend)
        self._offload = KVOffload(config, self._table, self._pool, self._host, self._lock)
        parts = CacheParts(config, self._table, self._pool, self._storage, info.backend, self._lock)
        self._labels: dict[str, tuple[str, ...]] = {}
        self._transfer = KVTransfer(parts, transfer, info.waker.wake)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer."""
        return self._storage.layer(index)

    @property
    def num_bytes(self) -> int:
        """What it holds of the device; nothing while it is released."""
        return self._storage.num_bytes

    @property
    def num_free_pages(self) -> int:
        """Pages that no request holds."""
        return self._pool.num_free

    @property
    def cached_tokens(self) -> int:
        """Tokens in free pages that a request could take over."""
        return self._pool.num_cached * self.config.page_size

    @property
    def used_tokens(self) -> int:
        """Tokens' worth of pages that requests hold."""
        return (self._pool.num_pages - self._pool.num_free) * self.config.page_size

    def stored_len(self, rid: str, label: str = DEFAULT_LABEL) -> int:
        """Committed tokens of a stream; 0 for one that does not exist."""
        with self._lock:
            stream = self._table.find(rid, label)
            return 0 if stream is None else stream.stored_len

    def pages(self, rid: str, label: str, length: int) -> StreamPages:
        """The pages that hold a stream's first `length` tokens."""
        with self._lock:
            stream = self._table.streams[rid][label]
            count = self.config.pages_for(length)
            return StreamPages(stream.generation, tuple(stream.pages[:count].tolist()))

    def ingest_request(self, rid: str, config: ResourceConfig | None) -> None:
        with self._lock:
            self._table.streams.setdefault(rid, {})
            if config is not None:
                assert isinstance(config, KVRequestConfig)
                self._sharing.open(rid, config)
                self._labels[rid] = config.labels

    def remove_request(self, rid: str) -> None:
        with self._lock:
            self._sharing.close(rid)
            self._labels.pop(rid, None)
            self._transfer.remove(rid)
            for stream in self._table.streams.pop(rid, {}).values():
                self._pool.give_back(stream.cut(0))
                self._offload.forget(stream)

    def adopt(self, rid: str) -> int:
        with self._lock:
            return self._sharing.adopt(rid)

    def forget(self) -> None:
        with self._lock:
            self._sharing.forget()

    def fits(self, totals: Mapping[str, int]) -> bool:
        with self._lock:
            wanted = sum(
                self._table.missing_pages(rid, total, self._labels.get(rid, ()))
                for rid, total in totals.items()
            )
            return wanted <= self._pool.num_free

    def admit(self, step: ResourceStep, ctx: StepContext) -> AdmitOutcome:
        assert isinstance(step, KVStep)
        with self._lock:
            self.unadmit(step, ctx)
            if self._storage.released:
                message = f"cache {self.key!r} is released; restore it first"
                return AdmitOutcome(ok=False, reason=AdmitRuntimeError(message))
            growth = self._table.growth(step)
            refusal = (
                self._sharing.refusal(step)
                or self._transfer.refusal(step)
                or self._table.refusal(step, growth)
            )
            if refusal is not None:
                return AdmitOutcome(ok=False, reason=self._transfer.or_wait(refusal))
            ctx.reservations[self.key] = self._table.reserve(step, growth)
            return ADMITTED

    def unadmit(self, step: ResourceStep, ctx: StepContext) -> None:
        with self._lock:
            taken = ctx.reservations.pop(self.key, None)
            if taken is not None:
                assert isinstance(taken, Reservation)
                self._table.undo(taken)

    def plan(self, step: ResourceStep, ctx: StepContext) -> KVPlan:
        assert isinstance(step, KVStep)
        with self._lock:
            copies = tuple([self._table.fork(fork) for fork in step.pre_forks])
            target = self._backend if ctx.lease is None else self._static(step, ctx.lease)
            return build_plans(step, self._table.streams, self.config.page_size, target, copies)

    def _static(self, step: KVStep, lease: SlotLease) -> StaticTarget:
        longest = self.config.max_seq_len if step.max_context is None else step.max_context
        return StaticTarget(lease, self._buffers, self.config.pages_for(longest))

    def claim_buffers(self, claim: BufferClaim) -> None:
        self._buffers.claim(claim)

    def begin(self, step: ResourceStep, ctx: StepContext) -> None:
        for source, target in ctx.plan_results[self.key].copies:
            self._storage.copy_pages(source, target)

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        assert isinstance(step, KVStep)
        with self._lock:
            taken = ctx.reservations.pop(self.key, None)
            if taken is not None:
                for stream in taken.touched:
                    stream.step_in_flight = False
            if step.commit:
                self._table.advance(step)
                self._sharing.learn(step)
            for fork in step.post_forks:
                self._storage.copy_pages(*self._table.fork(fork))

    def publish(self, rid: str) -> PublishedKV:
        """Committed tokens by label, and where they are."""
        with self._lock:
            return self._transfer.publish(rid)

    def hold(self, rid: str) -> PublishedKV:
        """Take all that the request has stored out of the cache, and keep it for another engine
        until that has read it, or a time limit passes.

        Raises `RequestFailedError` where that cannot be.
        """
        with self._lock:
            self._sharing.close(rid)
            return self._transfer.hold(rid)

    def admit_retrieve(self, rid: str, published: object | None) -> AdmitOutcome:
        if published is None:
            return ADMITTED
        if not isinstance(published, PublishedKV):
            message = f"cache {self.key!r} cannot read {type(published).__name__!r}"
            return AdmitOutcome(ok=False, reason=AdmitRuntimeError(message, rid))
        with self._lock:
            labels = self._labels.get(rid, (DEFAULT_LABEL,))
            return self._transfer.retrieve(rid, published, labels, lambda: self._sharing.adopt(rid))

    def let_go(self, published: PublishedKV, ending: Ending) -> None:
        """Nothing more of what another engine holds is wanted here: tell it. Does not wait."""
        self._transfer.let_go(published, ending)

    def is_offloaded(self, rid: str) -> bool:
        return self._offload.is_offloaded(rid)

    def reclaimable(self, rid: str) -> int:
        with self._lock:
            streams = self._table.of(rid).values()
            return sum(self._pool.num_freed_by(stream.pages.tolist()) for stream in streams)

    def offload(self, rid: str) -> int:
        return self._offload.offload(rid)

    def reload(self, rid: str) -> bool:
        return self._offload.reload(rid)

    def release(self, tags: frozenset[str]) -> None:
        if KV_TAG not in tags or self._storage.released:
            return
        assert self.at_rest(), "the cache is released only when no request holds any of it"
        self.forget()
        self._host.release()
        self._storage.release()

    def restore(self, tags: frozenset[str]) -> None:
        if KV_TAG in tags and self._storage.released:
            self._storage.restore()
            self._host.restore()

    def at_rest(self) -> bool:
        with self._lock:
            empty = not self._table.streams and self._pool.num_free == self._pool.num_pages
            return empty and self._offload.at_rest() and self._transfer.at_rest()

    def cleanup(self) -> None:
        self._transfer.close()
