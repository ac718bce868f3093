"""What must hold of a cache's pages at any time, whoever holds them."""

from __future__ import annotations

from collections import Counter

from phalanx.step.resources.kv_cache import KVCache


def check_pages(cache: KVCache) -> None:
    """Every page is held or free, holders are counted, and nobody can write to a shared page."""
    with cache._lock:
        _check_pages(cache)


def _check_pages(cache: KVCache) -> None:
    streams = [stream for streams in cache._table.streams.values() for stream in streams.values()]
    held = Counter(page for stream in streams for page in stream.pages.tolist())
    pool = cache._pool
    assert pool.num_free + len(held) == pool.num_pages
    for page, count in held.items():
        assert pool._holders[page] == count
    for stream in streams:
        full = stream.stored_len // cache.config.page_size
        for page in stream.pages[full:].tolist():
            assert held[page] == 1
            assert page not in cache._sharing._index
