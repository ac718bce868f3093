"""Which (request, label) streams a paged cache holds, and what a step reserves of its pages.

Plain bookkeeping on the host, without a lock of its own: the cache holds one around every call.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from phalanx.step.declaration import DEFAULT_LABEL, Fork
from phalanx.step.outcomes import AdmitRuntimeError, AllocationFailed, RequestOffloading
from phalanx.step.resources.cache_stream import CacheStream, Residence
from phalanx.step.resources.kv_step import KVConfig, KVStep
from phalanx.step.resources.page_pool import PagePool

logger = logging.getLogger(__name__)


Growth = dict[tuple[str, str], tuple[CacheStream | None, int]]
"""By (request, label): the stream, where there is one, and the tokens that it must hold."""


@dataclass
class Reservation:
    """What one step took: the streams it touched, with their pages and lengths before."""

    touched: list[CacheStream] = field(default_factory=list)
    grown: list[tuple[CacheStream, int]] = field(default_factory=list)
    forked: list[tuple[CacheStream, int]] = field(default_factory=list)
    invented: list[tuple[str, str]] = field(default_factory=list)


class StreamTable:
    """See the module."""

    def __init__(self, config: KVConfig, pool: PagePool) -> None:
        self._config = config
        self._pool = pool
        self.streams: dict[str, dict[str, CacheStream]] = {}

    def find(self, rid: str, label: str) -> CacheStream | None:
        return self.streams.get(rid, {}).get(label)

    def of(self, rid: str) -> Mapping[str, CacheStream]:
        """A request's streams by label; empty for an unknown one."""
        return self.streams.get(rid, {})

    def missing_pages(self, rid: str, total: int, labels: Iterable[str]) -> int:
        """Pages that a request lacks for `total` tokens in each stream that it has, and in those of
        `labels`; in one at least.
        """
        wanted, streams = self._config.pages_for(total), self.of(rid)
        new = sum(label not in streams for label in labels)
        if not streams:
            new = max(1, new)
        return new * wanted + sum(max(0, wanted - one.num_pages) for one in streams.values())

    def growth(self, step: KVStep) -> Growth:
        """Every stream that a step grows or makes, and the tokens that it must then hold."""
        grown: Growth = {}
        for fork in step.pre_forks:
            self._fork_growth(grown, fork)
        for segment in step.segments:
            key = (segment.request_id, segment.label)
            stream, length = grown.get(key) or self._present(key)
            grown[key] = stream, length + segment.span
        for fork in step.post_forks:
            self._fork_growth(grown, fork)
        return grown

    def refusal(
        self, step: KVStep, growth: Growth
    ) -> AllocationFailed | AdmitRuntimeError | RequestOffloading | None:
        """Why a step cannot be reserved now, or None."""
        for fork in (*step.pre_forks, *step.post_forks):
            away = _away(fork.request_id, fork.source, self.find(fork.request_id, fork.source))
            if away is not None:
                return away
        page_size, wanted = self._config.page_size, 0
        last = ("", DEFAULT_LABEL)
        for key, (stream, total) in growth.items():
            if total > self._config.max_seq_len:
                return AdmitRuntimeError(
                    f"{total} tokens exceed the cache's sequence limit {self._config.max_seq_len}",
                    key[0],
                )
            away = _away(*key, stream)
            if away is not None:
                return away
            held = 0 if stream is None else stream.num_pages
            if total > held * page_size:
                wanted, last = wanted + self._config.pages_for(total) - held, key
        missing = wanted - self._pool.num_free
        if missing <= 0:
            return None
        return AllocationFailed(
            f"{wanted} pages wanted, {self._pool.num_free} free", missing, last[0], last[1]
        )

    def reserve(self, step: KVStep, growth: Growth) -> Reservation:
        """Take the pages that a step needs, of which there are enough, and mark its streams."""
        taken = Reservation()
        page_size = self._config.page_size
        for (rid, label), (found, total) in growth.items():
            stream = found
            if stream is None:
                stream = self.streams[rid][label] = CacheStream()
                taken.invented.append((rid, label))
            if total > stream.num_pages * page_size:
                taken.grown.append((stream, stream.num_pages))
                stream.append(self._pool.take(self._config.pages_for(total) - stream.num_pages))
            stream.step_in_flight = True
            taken.touched.append(stream)
        for fork in step.pre_forks:
            target = self.streams[fork.request_id][fork.target]
            taken.forked.append((target, target.stored_len))
        return taken

    def undo(self, taken: Reservation) -> None:
        """Give back what `reserve` took."""
        for stream, num_pages in taken.grown:
            self._pool.give_back(stream.cut(num_pages))
        for stream, stored_len in taken.forked:
            stream.stored_len = stored_len
        for rid, label in taken.invented:
            # The request may have been removed, and added again, meanwhile.
            if self.find(rid, label) in taken.touched:
                del self.streams[rid][label]
        for stream in taken.touched:
            stream.step_in_flight = False

    def advance(self, step: KVStep) -> None:
        """A step's tokens are stored."""
        for segment in step.segments:
            if segment.span:
                stream = self.streams[segment.request_id][segment.label]
                if stream.residence is Residence.HOST:
                    logger.warning(
                        "dropped %d tokens of request %r, label %r: it was offloaded under its step",
                        segment.span,
                        segment.request_id,
                        segment.label,
                    )
                    continue
                stream.stored_len += segment.span
                stream.generation += 1

    def fork(self, fork: Fork) -> tuple[list[int], list[int]]:
        """Make the target as long as its source; returns the pages to copy from and to."""
        streams = self.streams[fork.request_id]
        source, target = streams[fork.source], streams[fork.target]
        if source.residence is Residence.HOST:
            return [], []  # its tokens were dropped, as `advance` has said
        count = self._config.pages_for(source.stored_len)
        target.stored_len = source.stored_len
        target.generation += 1
        return source.pages[:count].tolist(), target.pages[:count].tolist()

    def _present(self, key: tuple[str, str]) -> tuple[CacheStream | None, int]:
        stream = self.streams[key[0]].get(key[1])
        return stream, 0 if stream is None else stream.stored_len

    def _fork_growth(self, grown: Growth, fork: Fork) -> None:
        source, target = (fork.request_id, fork.source), (fork.request_id, fork.target)
        _, length = grown.get(source) or self._present(source)
        grown[target] = self.streams[fork.request_id].get(fork.target), length


def _away(rid: str, label: str, stream: CacheStream | None) -> RequestOffloading | None:
    """The refusal of a step on a stream that is not on the device."""
    if stream is None or stream.residence is Residence.DEVICE:
        return None
    message = f"stream {label!r} of request {rid!r} is offloaded; reload it first"
    return RequestOffloading(message, rid, label)
