"""What a paged cache publishes of a request, holds for another engine, and reads from one.

Pages of a hold belong to nobody here until it ends. Pages that are being read into belong to the
transfer until it lets go of them, whatever becomes of their request.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import msgspec

from phalanx.device.base import DeviceBackend
from phalanx.errors import RequestFailedError
from phalanx.schema.handoff import Handle, KVGeometry, PublishedKV, PublishedStream, Source
from phalanx.step.outcomes import (
    ADMITTED,
    AdmitOutcome,
    AdmitRuntimeError,
    AllocationFailed,
    NotReady,
    RefusalReason,
)
from phalanx.step.resources.cache_stream import CacheStream, Residence
from phalanx.step.resources.kv_pages import TokenRange
from phalanx.step.resources.kv_step import KVConfig, KVStep
from phalanx.step.resources.kv_storage import KVStorage
from phalanx.step.resources.kv_streams import StreamTable
from phalanx.step.resources.page_pool import PagePool
from phalanx.step.transfer.base import Content, Ending, PageRead, Reason, Transfer

NOWHERE = Source("none", "", 0, "")


@dataclass(frozen=True)
class TransferSpec:
    """How a cache is read by others and reads from them; this is rank `rank` of `world_size`."""

    make: Callable[[], Transfer]
    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True)
class CacheParts:
    """What the cache shares with its helpers; every use of table and pool holds `lock`."""

    config: KVConfig
    table: StreamTable
    pool: PagePool
    storage: KVStorage
    backend: DeviceBackend
    lock: threading.RLock

    def range(self, stream: CacheStream, start: int, stop: int) -> TokenRange:
        pages = stream.pages.tolist()
        return TokenRange(self.config, self.storage, pages, start, stop, self.backend)


@dataclass
class _Reading:
    """One stream on its way here."""

    stream: CacheStream
    future: Future[None]
    length: int


@dataclass
class _Import:
    """What becomes of one request's published state."""

    handles: tuple[Handle, ...]
    readings: dict[str, _Reading] = field(default_factory=dict)
    error: str | None = None
    begun: bool = False
    landed: bool = False


class _HeldStreams:
    """A request's streams, which it no longer has. A `HeldState`."""

    def __init__(
        self,
        parts: CacheParts,
        streams: Mapping[str, CacheStream],
        freed: Callable[[_HeldStreams], None],
    ) -> None:
        self._parts = parts
        self._streams = streams
        self._freed = freed
        self._computed = parts.backend.record_event()
        self.num_pages = sum(stream.num_pages for stream in streams.values())

    def open(self, read: PageRead) -> Content:
        stream = self._streams.get(read.label)
        if stream is None or stream.generation != read.generation:
            raise RequestFailedError(f"label {read.label!r} is not held as it was published")
        if not 0 <= read.start < read.stop <= stream.stored_len:
            raise RequestFailedError(
                f"tokens {read.start} to {read.stop} of {stream.stored_len} are not there"
            )
        self._computed.synchronize()
        return self._parts.range(stream, read.start, read.stop)

    def taken(self) -> Mapping[str, CacheStream]:
        """Its streams, which belong to the caller from now on; called with the lock held."""
        streams, self._streams = self._streams, {}
        self._freed(self)
        return streams

    def free(self) -> None:
        with self._parts.lock:
            for stream in self.taken().values():
                self._parts.pool.give_back(stream.cut(0))


@dataclass(frozen=True)
class _Shape:
    """What must be equal on both sides of a transfer."""

    rank: int
    world_size: int
    geometry: KVGeometry

    @classmethod
    def of(cls, config: KVConfig, spec: TransferSpec | None) -> _Shape:
        dtype = str(config.dtype).removeprefix("torch.")
        heads, size = config.num_kv_heads, config.page_size
        geometry = KVGeometry(config.num_layers, heads, config.head_dim, size, dtype)
        return cls(0, 1, geometry) if spec is None else cls(spec.rank, spec.world_size, geometry)

    def mismatch(self, published: PublishedKV, needed: Sequence[str]) -> str | None:
        """What can never fit: other ranks or labels, or pages of another shape."""
        if published.world_size != self.world_size:
            return (
                f"the state was published by an engine of {published.world_size} ranks and this "
                f"one has {self.world_size}; both must have as many"
            )
        theirs = msgspec.structs.asdict(published.geometry)
        for name, ours in msgspec.structs.asdict(self.geometry).items():
            if theirs[name] != ours:
                return (
                    f"the state was published with {name}={theirs[name]} and this engine has "
                    f"{ours}; both must have the same model, dtype and page size"
                )
        for label in needed:
            if label not in published.ranks.get(self.rank, {}):
                return f"rank {self.rank} has published nothing of label {label!r}"
        return None


class KVTransfer:
    """See the module. Called with the cache's lock held, but for `changed` and what ends a read."""

    def __init__(
        self, parts: CacheParts, spec: TransferSpec | None, changed: Callable[[], None]
    ) -> None:
        """`changed` is called when a read or a hold has ended, on any thread."""
        self._parts = parts
        self._transfer = None if spec is None else spec.make()
        self._shape = _Shape.of(parts.config, spec)
        self._changed = changed
        self._imports: dict[str, _Import] = {}
        self._num_held_pages = 0
        """Pages that nobody here has and that come back by themselves."""

    def publish(self, rid: str) -> PublishedKV:
        """A request's committed tokens by label; readable once they are held."""
        source = NOWHERE if self._transfer is None else self._transfer.source
        return self._published(self._parts.table.of(rid), Handle(source))

    def hold(self, rid: str) -> PublishedKV:
        """Take a request's streams out of the cache and keep them for whoever reads them."""
        table = self._parts.table
        if self._transfer is None:
            raise RequestFailedError("this cache was built without a transfer")
        streams = dict(table.of(rid))
        if any(
            one.step_in_flight or one.residence is not Residence.DEVICE for one in streams.values()
        ):
            raise RequestFailedError(f"request {rid!r} is being computed or moved")
        table.streams[rid] = {}
        state = _HeldStreams(self._parts, streams, self._came_back)
        self._num_held_pages += state.num_pages
        handle = self._transfer.hold(state)
        return self._published(streams, handle)

    def or_wait(self, refusal: RefusalReason) -> RefusalReason:
        """`refusal`, unless waiting alone ends it: what is held for others comes back before long,
        and requests whose state is on its way here will run and end.
        """
        if not isinstance(refusal, AllocationFailed):
            return refusal
        readings = [one for known in self._imports.values() for one in known.readings.values()]
        awaited = self._num_held_pages + sum(one.stream.num_pages for one in readings)
        if refusal.pages_short > awaited:
            return refusal
        return NotReady(
            f"{refusal.message}; {awaited} are held for other engines or on their way from them",
            refusal.request_id,
        )

    def let_go(self, published: PublishedKV, ending: Ending) -> None:
        """Nothing of this is wanted here any more: tell its holder."""
        if self._transfer is not None:
            for handle in published.handles():
                self._transfer.release(handle, ending)

    def retrieve(
        self, rid: str, published: PublishedKV, needed: Sequence[str], adopt: Callable[[], object]
    ) -> AdmitOutcome:
        """Import the labels in `needed`: start what is missing, and look at what is on its way.

        `adopt` lets the request take over what is known here already.
        """
        known = self._imports.get(rid)
        if known is None:
            known = self._imports[rid] = _Import(published.handles())
            known.error = self._shape.mismatch(published, needed) or self._take_back(
                rid, published, needed
            )
        if known.landed:
            return ADMITTED
        if known.error is None and not known.begun:
            adopt()
            wanted = self._wanted(rid, published.ranks.get(self._shape.rank, {}), needed)
            refusal = self._no_room(rid, wanted)
            if refusal is not None:
                return AdmitOutcome(ok=False, reason=self.or_wait(refusal))
            self._begin(rid, known, wanted)
        self._settle(known)
        if known.error is not None:
            return AdmitOutcome(ok=False, reason=AdmitRuntimeError(known.error, rid))
        if known.readings:
            return AdmitOutcome(ready=False)
        known.landed = True
        assert self._transfer is not None
        for handle in known.handles:
            self._transfer.release(handle)
        return ADMITTED

    def refusal(self, step: KVStep) -> NotReady | None:
        """Why a step cannot run yet: a stream of it is on its way here."""
        if not self._imports:
            return None
        for segment in step.segments:
            known = self._imports.get(segment.request_id)
            if known is not None and known.readings:
                return NotReady("its computed prompt is on its way here", segment.request_id)
        return None

    def remove(self, rid: str) -> None:
        """A request ends: before its streams are freed."""
        known = self._imports.pop(rid, None)
        if known is None:
            return
        for reading in known.readings.values():
            pages = reading.stream.cut(0)
            self._num_held_pages += len(pages)
            reading.future.cancel()
            reading.future.add_done_callback(partial(self._let_go, pages))
        unread = known.error is not None or known.begun
        if unread and not known.landed and self._transfer is not None:
            message = known.error or "the request ended before its computed prompt had come"
            for handle in known.handles:
                self._transfer.release(handle, Ending(Reason.DROPPED, message))

    def at_rest(self) -> bool:
        return not self._imports

    def close(self) -> None:
        """Called without the lock: ends every hold and waits for what is being read."""
        if self._transfer is not None:
            self._transfer.close()

    def _published(self, streams: Mapping[str, CacheStream], handle: Handle) -> PublishedKV:
        pages_for = self._parts.config.pages_for
        ours = {
            label: PublishedStream(
                stream.stored_len,
                handle,
                tuple(stream.pages[: pages_for(stream.stored_len)].tolist()),
                stream.generation,
            )
            for label, stream in streams.items()
        }
        return PublishedKV(self._shape.world_size, self._shape.geometry, {self._shape.rank: ours})

    def _take_back(self, rid: str, published: PublishedKV, needed: Sequence[str]) -> str | None:
        """Make what this cache holds itself the request's again; why that cannot be, or None."""
        if self._transfer is None:
            return "state is to be imported, but this cache was built without a transfer"
        ours, theirs = self._parts.table.streams[rid], published.ranks.get(self._shape.rank, {})
        for handle in published.handles():
            try:
                state = self._transfer.take_back(handle)
            except RequestFailedError as error:
                return str(error)
            if state is None:
                continue
            assert isinstance(state, _HeldStreams)
            for label, stream in state.taken().items():
                claimed = theirs.get(label)
                as_published = claimed is not None and _same(stream, claimed)
                if as_published and label in needed and label not in ours:
                    ours[label] = stream
                else:
                    self._parts.pool.give_back(stream.cut(0))
        return None

    def _wanted(
        self, rid: str, theirs: Mapping[str, PublishedStream], needed: Sequence[str]
    ) -> dict[str, PublishedStream]:
        wanted: dict[str, PublishedStream] = {}
        for label in needed:
            published = theirs[label]
            stream = self._parts.table.find(rid, label)
            have = 0 if stream is None else stream.stored_len
            if published.length > have:
                wanted[label] = published
        return wanted

    def _no_room(
        self, rid: str, wanted: Mapping[str, PublishedStream]
    ) -> AllocationFailed | AdmitRuntimeError | None:
        config, pool = self._parts.config, self._parts.pool
        num_pages = 0
        for label, published in wanted.items():
            if published.length > config.max_seq_len:
                return AdmitRuntimeError(
                    f"{published.length} tokens exceed the cache's sequence limit "
                    f"{config.max_seq_len}",
                    rid,
                )
            stream = self._parts.table.find(rid, label)
            held = 0 if stream is None else stream.num_pages
            num_pages += max(0, config.pages_for(published.length) - held)
        if num_pages <= pool.num_free:
            return None
        message = f"{num_pages} pages wanted for an import, {pool.num_free} free"
        return AllocationFailed(message, num_pages - pool.num_free, rid)

    def _begin(self, rid: str, known: _Import, wanted: Mapping[str, PublishedStream]) -> None:
        """Take the pages, of which there are enough, and have the missing suffixes read."""
        known.begun = True
        parts, transfer = self._parts, self._transfer
        assert transfer is not None
        for label, published in wanted.items():
            stream = parts.table.streams[rid].setdefault(label, CacheStream())
            short = parts.config.pages_for(published.length) - stream.num_pages
            stream.append(parts.pool.take(max(0, short)))
            read = PageRead(label, published.generation, stream.stored_len, published.length)
            sink = parts.range(stream, read.start, read.stop)
            future = transfer.read(published.handle, read, sink)
            # As if a step computed it: nobody moves it, and nobody adds to it.
            stream.step_in_flight = True
            known.readings[label] = _Reading(stream, future, published.length)
            future.add_done_callback(lambda _: self._changed())

    def _settle(self, known: _Import) -> None:
        """Make what has landed part of the state; the first failure stays."""
        for label, reading in list(known.readings.items()):
            if not reading.future.done():
                continue
            error = reading.future.exception()
            if error is not None:
                known.error = known.error or str(error)
                continue
            reading.stream.stored_len = reading.length
            reading.stream.generation += 1
            reading.stream.step_in_flight = False
            del known.readings[label]

    def _came_back(self, state: _HeldStreams) -> None:
        self._num_held_pages -= state.num_pages
        self._changed()

    def _let_go(self, pages: Sequence[int], _: Future[None]) -> None:
        """A read into these pages has ended, whose request had ended before."""
        with self._parts.lock:
            self._num_held_pages -= len(pages)
            self._parts.pool.give_back(pages)
        self._changed()


def _same(stream: CacheStream, published: PublishedStream) -> bool:
    """Whether a stream is still what was published of it."""
    return (stream.stored_len, stream.generation) == (published.length, published.generation)
