"""Requests that begin alike hold the same pages: who may take over what, and what becomes known.

Only whole pages whose tokens are committed are shared, so that nobody writes to a shared page.
Plain bookkeeping without a lock of its own: the cache holds one around every call.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.step.declaration import DEFAULT_LABEL
from phalanx.step.outcomes import AdmitRuntimeError
from phalanx.step.resources.cache_stream import CacheStream, Residence
from phalanx.step.resources.kv_step import KVConfig, KVRequestConfig, KVStep
from phalanx.step.resources.kv_streams import StreamTable
from phalanx.step.resources.page_pool import PagePool
from phalanx.step.resources.prefix_index import PrefixIndex
from phalanx.step.resources.token_pages import TokenPages


@dataclass
class _Prefix:
    """One stream of one request: its first `num_known` pages can be told from its start."""

    pages: TokenPages
    num_known: int
    reusable: int
    num_registered: int = 0
    stale: bool = False
    """What it holds is not what new requests would compute."""


class PrefixSharing:
    """See the module."""

    def __init__(
        self, config: KVConfig, table: StreamTable, pool: PagePool, index: PrefixIndex
    ) -> None:
        self._config = config
        self._table = table
        self._pool = pool
        self._index = index
        self._prefixes: dict[str, dict[str, _Prefix]] = {}
        """By request and label."""
        self._unregistered: dict[tuple[str, str], _Prefix] = {}
        """Those with known pages that are not committed yet; none while all rows decode."""

    def open(self, rid: str, config: KVRequestConfig) -> None:
        """Share the request's pages from now on; opening it again changes nothing."""
        if not self._config.prefix_cache or rid in self._prefixes:
            return
        given = {DEFAULT_LABEL: (config.token_ids, config.num_reusable)}
        given |= {label: (ids, len(ids) - 1) for label, ids in config.others.items()}
        opened = self._prefixes[rid] = {}
        for label, (token_ids, reusable) in given.items():
            pages = TokenPages(token_ids, self._config.page_size, config.salt)
            opened[label] = self._unregistered[rid, label] = _Prefix(pages, len(pages), reusable)

    def adopt(self, rid: str) -> int:
        """Hold what is known of the next tokens of the request's streams; returns how many tokens
        that is.

        A page of which the request has computed a part gives way to the whole one.
        """
        return sum(
            self._adopt(rid, label, prefix)
            for label, prefix in self._prefixes.get(rid, {}).items()
            if not prefix.stale
        )

    def _adopt(self, rid: str, label: str, prefix: _Prefix) -> int:
        stream = self._table.find(rid, label)
        if stream is not None and not self._can_grow(stream):
            return 0
        size = self._config.page_size
        stored = 0 if stream is None else stream.stored_len
        first = last = stored // size
        found: list[int] = []
        while (last + 1) * size <= prefix.reusable:
            page = self._index.find(prefix.pages.digest(last))
            if page is None:
                break
            found.append(page)
            last += 1
        if not found:
            return 0
        if stream is None:
            stream = self._table.streams[rid][label] = CacheStream()
        self._pool.share(found)
        self._pool.give_back(stream.cut(first))
        stream.append(found)
        stream.stored_len = last * size
        stream.generation += 1
        return stream.stored_len - stored

    def learn(self, step: KVStep) -> None:
        """A step is committed: other requests may hold the pages that it filled."""
        if not self._unregistered:
            return
        for segment in step.segments:
            key = (segment.request_id, segment.label)
            prefix, stream = self._unregistered.get(key), self._table.find(*key)
            if prefix is not None and stream is not None:
                full = min(stream.stored_len // self._config.page_size, prefix.num_known)
                self._register(prefix, stream, prefix.num_registered, full)
                prefix.num_registered = full
                if full == prefix.num_known:
                    del self._unregistered[key]

    def close(self, rid: str) -> None:
        """A request ends and still holds its pages: what it has produced becomes known too."""
        for label, prefix in self._prefixes.pop(rid, {}).items():
            self._unregistered.pop((rid, label), None)
            stream = self._table.find(rid, label)
            if not prefix.stale and stream is not None:
                full = min(stream.stored_len // self._config.page_size, len(prefix.pages))
                self._register(prefix, stream, 0, min(full, stream.num_pages))

    def forget(self) -> None:
        """Nothing that is or was computed so far is shared from now on."""
        self._pool.forget()
        self._unregistered.clear()
        for prefixes in self._prefixes.values():
            for prefix in prefixes.values():
                prefix.stale = True

    def refusal(self, step: KVStep) -> AdmitRuntimeError | None:
        """Why a step would write to pages that others may hold, or None."""
        for fork in (*step.pre_forks, *step.post_forks):
            if fork.target in self._prefixes.get(fork.request_id, {}):
                return AdmitRuntimeError(
                    f"a fork onto {fork.target!r} would overwrite pages that other requests may "
                    "hold; fork onto another label, or give the request no KVRequestConfig",
                    fork.request_id,
                )
        return None

    def _can_grow(self, stream: CacheStream) -> bool:
        """Whether all of the stream is in the pool, and no step or move of it is under way."""
        resident = stream.residence is Residence.DEVICE and not stream.step_in_flight
        return resident and stream.num_pages == self._config.pages_for(stream.stored_len)

    def _register(self, prefix: _Prefix, stream: CacheStream, first: int, end: int) -> None:
        for index, page in enumerate(stream.pages[first:end].tolist(), first):
            if page not in self._index:
                self._index.register(prefix.pages.digest(index), page)
