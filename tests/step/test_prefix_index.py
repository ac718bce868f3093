"""The books of cached pages, against a model that remembers everything by its tokens."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from phalanx.step.resources.page_pool import SINK_PAGE, PagePool
from phalanx.step.resources.prefix_index import PrefixIndex
from phalanx.step.resources.token_pages import TokenPages

A, B, C = b"a", b"b", b"c"


def pool_of(num_pages: int) -> tuple[PagePool, PrefixIndex]:
    index = PrefixIndex()
    return PagePool(num_pages, index), index


def test_a_registered_page_is_kept_and_found_until_it_is_taken():
    pool, index = pool_of(3)
    first, second = pool.take(2)
    assert index.register(A, first)
    pool.give_back([first, second])
    assert (pool.num_free, pool.num_cached) == (3, 1)
    assert index.find(A) == first
    assert first not in pool.take(2), "pages that hold nothing go first"
    assert pool.take(1) == [first]
    assert index.find(A) is None
    assert pool.num_cached == 0


def test_the_page_that_rested_longest_is_given_up_first():
    pool, index = pool_of(3)
    pages = pool.take(3)
    for digest, page in zip((A, B, C), pages, strict=True):
        index.register(digest, page)
    pool.give_back([pages[1]])
    pool.give_back([pages[0]])
    pool.give_back([pages[2]])
    pool.share([pages[1]])
    pool.give_back([pages[1]])
    assert pool.take(3) == [pages[0], pages[2], pages[1]]


def test_of_a_sequence_the_end_is_given_up_before_the_beginning():
    pool, index = pool_of(3)
    pages = pool.take(3)
    for digest, page in zip((A, B, C), pages, strict=True):
        index.register(digest, page)
    pool.give_back(pages)
    assert pool.take(1) == [pages[2]]
    assert (index.find(A), index.find(B)) == (pages[0], pages[1])


def test_a_page_of_several_holders_is_free_when_the_last_has_given_it_back():
    pool, index = pool_of(2)
    [page] = pool.take(1)
    index.register(A, page)
    pool.share([page])
    assert pool.num_freed_by([page]) == 0
    pool.give_back([page])
    assert pool.num_free == 1
    assert pool.num_freed_by([page]) == 1
    pool.give_back([page])
    assert pool.num_free == 2
    with pytest.raises(AssertionError, match="by nobody who holds it"):
        pool.give_back([page])


def test_the_same_tokens_are_registered_once():
    pool, index = pool_of(2)
    first, second = pool.take(2)
    assert index.register(A, first)
    assert not index.register(A, second)
    assert index.find(A) == first
    assert (first in index, second in index) == (True, False)
    with pytest.raises(AssertionError, match="registered already"):
        index.register(B, first)


def test_only_registered_pages_are_shared():
    pool, _ = pool_of(2)
    [page] = pool.take(1)
    with pytest.raises(AssertionError, match="not registered"):
        pool.share([page])


def test_what_is_forgotten_is_free_and_found_by_nobody():
    pool, index = pool_of(3)
    held, resting = pool.take(2)
    index.register(A, held)
    index.register(B, resting)
    pool.give_back([resting])
    pool.forget()
    assert (pool.num_free, pool.num_cached, len(index)) == (2, 0, 0)
    pool.give_back([held])
    assert (pool.num_free, pool.num_cached) == (3, 0)
    assert sorted(pool.take(3)) == [1, 2, 3]


def test_digests_tell_tokens_places_and_salts_apart():
    tokens = [7, 7, 7, 7, 7, 7]
    pages = TokenPages(tokens, 2, "")
    assert len(pages) == 3
    own = {pages.digest(index) for index in range(3)}
    assert len(own) == 3, "equal pages at other places are others"
    assert TokenPages([7, 7, 7, 7, 8, 7], 2, "").digest(1) == pages.digest(1)
    assert TokenPages([7, 7, 7, 7, 8, 7], 2, "").digest(2) != pages.digest(2)
    assert TokenPages([8, 7, 7, 7], 2, "").digest(1) != pages.digest(1)
    assert TokenPages(tokens, 2, "v2").digest(0) != pages.digest(0)


def test_digests_are_the_same_in_every_process():
    known = "017001053caa8a201a29aa5c3064407c"
    assert TokenPages([1, 2, 70000, 4], 2, "v1").digest(1).hex() == known


def test_tokens_that_come_later_make_pages():
    tokens = [1, 2, 3]
    pages = TokenPages(tokens, 2, "")
    assert len(pages) == 1
    with pytest.raises(AssertionError, match="page 1 is not full"):
        pages.digest(1)
    tokens.append(4)
    assert pages.digest(1) == TokenPages([1, 2, 3, 4], 2, "").digest(1)


class PoolMachine(RuleBasedStateMachine):
    """Streams of pages come, share and go; every page is held, kept or free, and never two of it."""

    @initialize(num_pages=st.integers(1, 6))
    def begin(self, num_pages):
        self.pool, self.index = pool_of(num_pages)
        self.streams: list[list[int]] = []
        self.digests: dict[int, bytes] = {}
        self.rested: list[int] = []

    @rule(count=st.integers(0, 4))
    def take(self, count):
        if count > self.pool.num_free:
            return
        free = self.pool.num_free - self.pool.num_cached
        given_up = self.rested[: max(0, count - free)]
        taken = self.pool.take(count)
        assert SINK_PAGE not in taken
        assert [page for page in taken if page in given_up] == given_up
        for page in given_up:
            self.rested.remove(page)
            del self.digests[page]
        assert not set(taken) & set(self.digests)
        self.streams.append(taken)

    @rule(choice=st.integers(0, 99), content=st.sampled_from([A, B, C, b"d"]))
    def register(self, choice, content):
        held = [page for stream in self.streams for page in stream]
        held = [page for page in held if page not in self.digests]
        if held:
            page = held[choice % len(held)]
            fresh = content not in self.digests.values()
            assert self.index.register(content, page) is fresh
            if fresh:
                self.digests[page] = content

    @rule(contents=st.lists(st.sampled_from([A, B, C, b"d"]), max_size=3, unique=True))
    def share(self, contents):
        found = [page for page in map(self.index.find, contents) if page is not None]
        self.pool.share(found)
        self.rested = [page for page in self.rested if page not in found]
        self.streams.append(found)

    @rule(choice=st.integers(0, 99))
    def give_back(self, choice):
        if not self.streams:
            return
        stream = self.streams.pop(choice % len(self.streams))
        held = Counter(page for stream in self.streams for page in stream)
        self.pool.give_back(stream)
        self.rested += [p for p in reversed(stream) if p in self.digests and not held[p]]

    @rule()
    def forget(self):
        self.pool.forget()
        self.digests.clear()
        self.rested.clear()

    @invariant()
    def books_are_right(self):
        if not hasattr(self, "pool"):
            return
        held = {page for stream in self.streams for page in stream}
        assert self.pool.num_free + len(held) == self.pool.num_pages
        assert self.pool.num_cached == len(self.rested) == self.index.num_resting
        assert len(self.index) == len(self.digests)
        for page, digest in self.digests.items():
            assert self.index.find(digest) == page


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, derandomize=True
)
