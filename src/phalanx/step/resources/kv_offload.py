"""Moves a request's streams between a paged cache and host memory.

A move claims its streams under the cache's lock, copies outside it, and settles under it again: what
was removed or changed in between is left as it is found, and everything that the move took goes back.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.step.resources.cache_stream import CacheStream, Residence
from phalanx.step.resources.host_pages import HostPages
from phalanx.step.resources.kv_step import KVConfig
from phalanx.step.resources.kv_streams import StreamTable
from phalanx.step.resources.page_pool import PagePool


@dataclass(frozen=True)
class _Move:
    """One stream on its way: the pages of either side that hold its tokens."""

    label: str
    stream: CacheStream
    generation: int
    device_pages: tuple[int, ...]
    host_pages: tuple[int, ...]


class KVOffload:
    """See the module. Shares table, pool and lock with the cache."""

    def __init__(
        self,
        config: KVConfig,
        table: StreamTable,
        pool: PagePool,
        host: HostPages,
        lock: threading.RLock,
    ) -> None:
        self._config = config
        self._table = table
        self._pool = pool
        self._host = host
        self._lock = lock

    def is_offloaded(self, rid: str) -> bool:
        with self._lock:
            streams = self._table.of(rid).values()
            return any(stream.residence is not Residence.DEVICE for stream in streams)

    def offload(self, rid: str) -> int:
        """Copy streams to the host and give their pages back; how many came free by that.

        A stream for which the host has no room stays, and one whose pages others hold too. All or
        nothing otherwise: nothing is moved if a step of the request is in flight, or if one of the
        claimed streams changed meanwhile.
        """
        with self._lock:
            moves = self._claim(rid)
        if not moves:
            return 0
        for move in moves:
            self._host.store(move.device_pages, move.host_pages)
        with self._lock:
            return self._settle_offload(rid, moves)

    def reload(self, rid: str) -> bool:
        """Copy all offloaded streams back; False where the pages for all of them are not free."""
        with self._lock:
            moves = self._claim_back(rid)
        if moves is None:
            return False
        for move in moves:
            self._host.load(move.host_pages, move.device_pages)
        with self._lock:
            return self._settle_reload(rid, moves)

    def forget(self, stream: CacheStream) -> None:
        """The stream's request is removed: free what it holds on the host."""
        if stream.residence is Residence.HOST:
            self._host.give_back(stream.host_pages)
            stream.host_pages = ()

    def at_rest(self) -> bool:
        return self._host.at_rest()

    def _claim(self, rid: str) -> list[_Move]:
        streams = self._table.of(rid)
        if any(stream.step_in_flight for stream in streams.values()):
            return []
        moves: list[_Move] = []
        for label, stream in streams.items():
            if stream.residence is not Residence.DEVICE:
                continue
            if not self._pool.num_freed_by(stream.pages.tolist()):
                continue
            count = self._config.pages_for(stream.stored_len)
            if count > self._host.num_free:
                continue
            stream.residence = Residence.MOVING
            pages = tuple(stream.pages[:count].tolist())
            taken = self._host.take(count)
            moves.append(_Move(label, stream, stream.generation, pages, taken))
        return moves

    def _settle_offload(self, rid: str, moves: Sequence[_Move]) -> int:
        if any(self._changed(rid, move) for move in moves):
            for move in moves:
                move.stream.residence = Residence.DEVICE
                self._host.give_back(move.host_pages)
            return 0
        freed = 0
        for move in moves:
            dropped = move.stream.cut(0)
            freed += self._pool.num_freed_by(dropped)
            self._pool.give_back(dropped)
            move.stream.host_pages = move.host_pages
            move.stream.residence = Residence.HOST
        return freed

    def _claim_back(self, rid: str) -> list[_Move] | None:
        streams = self._table.of(rid)
        if any(stream.residence is Residence.MOVING for stream in streams.values()):
            return None
        away = [
            (label, stream)
            for label, stream in streams.items()
            if stream.residence is Residence.HOST
        ]
        if sum(len(stream.host_pages) for _, stream in away) > self._pool.num_free:
            return None
        moves: list[_Move] = []
        for label, stream in away:
            stream.residence = Residence.MOVING
            pages = tuple(self._pool.take(len(stream.host_pages)))
            moves.append(_Move(label, stream, stream.generation, pages, stream.host_pages))
        return moves

    def _settle_reload(self, rid: str, moves: Sequence[_Move]) -> bool:
        complete = True
        for move in moves:
            self._host.give_back(move.host_pages)
            move.stream.host_pages = ()
            move.stream.residence = Residence.DEVICE
            if self._table.find(rid, move.label) is move.stream:
                move.stream.append(move.device_pages)
            else:
                self._pool.give_back(move.device_pages)
                complete = False
        return complete

    def _changed(self, rid: str, move: _Move) -> bool:
        found = self._table.find(rid, move.label)
        return found is not move.stream or found.generation != move.generation
