"""The cache: what admission takes, what comes back, and what a step leaves behind."""

from __future__ import annotations

import itertools
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.step.outcomes import AdmitRuntimeError, AllocationFailed
from phalanx.step.resources.cache_stream import CacheStream
from phalanx.step.resources.kv_cache import KV_TAG
from tests.step.caches import PAGE, context, in_flight, kv_step, lengths, make_cache, run, stored


def opened(cache, *rids):
    for rid in rids:
        cache.ingest_request(rid, None)
    return cache


def test_admission_takes_whole_pages_and_keeps_them():
    cache = opened(make_cache(8), "a")
    run(cache, kv_step(("a", 5)))
    assert cache.num_free_pages == 6
    assert cache.used_tokens == 2 * PAGE
    run(cache, kv_step(("a", 3)))
    assert cache.num_free_pages == 6, "three more tokens fit into the second page"
    run(cache, kv_step(("a", 1)))
    assert cache.num_free_pages == 5
    assert cache.stored_len("a") == 9


def test_admission_is_all_or_nothing():
    cache = opened(make_cache(3), "a", "b")
    step, ctx = kv_step(("a", 8), ("b", 8)), context("a", "b")
    outcome = cache.admit(step, ctx)
    assert not outcome.ok
    assert outcome.reason == AllocationFailed("4 pages wanted, 3 free", 1, "b", "main")
    assert cache.num_free_pages == 3
    assert not ctx.reservations
    assert in_flight(cache) == []
    assert lengths(cache, "a") == {}, "a refused step invents no stream"


def test_a_refused_step_can_be_admitted_once_there_is_room():
    cache = opened(make_cache(3), "a", "b")
    run(cache, kv_step(("b", 9)))
    step, ctx = kv_step(("a", 5)), context("a")
    assert not cache.admit(step, ctx).ok
    cache.remove_request("b")
    assert cache.admit(step, ctx).ok


def test_admitting_again_changes_nothing():
    cache = opened(make_cache(8), "a")
    step, ctx = kv_step(("a", 5)), context("a")
    for _ in range(3):
        assert cache.admit(step, ctx).ok
        assert cache.num_free_pages == 6
        assert in_flight(cache) == [("a", "main")]
    cache.unadmit(step, ctx)
    assert cache.num_free_pages == 8
    assert lengths(cache, "a") == {}


def test_unadmit_gives_back_exactly_what_was_taken():
    cache = opened(make_cache(8), "a", "b")
    run(cache, kv_step(("a", 5)), value=1.0)
    step, ctx = kv_step(("a", 4), ("b", 9)), context("a", "b")
    assert cache.admit(step, ctx).ok
    assert cache.num_free_pages == 2
    assert len(in_flight(cache)) == 2
    cache.unadmit(step, ctx)
    assert cache.num_free_pages == 6
    assert in_flight(cache) == []
    assert lengths(cache, "a") == {"main": 5}
    assert lengths(cache, "b") == {}, "the stream that the step invented is gone"
    assert stored(cache, "a") == [1.0, 2.0, 3.0, 4.0, 5.0]
    cache.unadmit(step, ctx)
    assert cache.num_free_pages == 6, "a second time there is nothing to give"


def test_unadmit_keeps_surplus_pages_that_were_there_before():
    cache = opened(make_cache(8), "a")
    run(cache, kv_step(("a", 9), commit=False))
    assert cache.num_free_pages == 5
    step, ctx = kv_step(("a", 13)), context("a")
    cache.admit(step, ctx)
    cache.unadmit(step, ctx)
    assert cache.num_free_pages == 5


def test_unadmit_after_the_request_was_removed_gives_nothing_twice():
    cache = opened(make_cache(8), "a")
    step, ctx = kv_step(("a", 9)), context("a")
    cache.admit(step, ctx)
    cache.remove_request("a")
    cache.unadmit(step, ctx)
    assert cache.num_free_pages == 8
    assert cache.at_rest()


def test_the_sink_page_is_never_handed_out():
    cache = opened(make_cache(3), "a", "b", "c")
    plan = run(cache, kv_step(("a", 4), ("b", 4), ("c", 4))).by_label["main"]
    assert sorted(plan.page_table.flatten().tolist()) == [1, 2, 3]
    assert min(plan.slots.tolist()) >= PAGE


def test_a_span_of_zero_reads_and_leaves_nothing():
    cache = opened(make_cache(2), "a", "b")
    run(cache, kv_step(("a", 8)))
    plan = run(cache, kv_step(("a", 0), ("b", 0))).by_label["main"]
    assert plan.lens == (8, 0)
    assert plan.slots.tolist() == []
    assert cache.stored_len("a") == 8
    assert cache.num_free_pages == 0, "b took no page: there was none"


def test_without_commit_tokens_are_written_and_lengths_stay():
    cache = opened(make_cache(4), "a")
    run(cache, kv_step(("a", 3)), value=1.0)
    plan = run(cache, kv_step(("a", 2), commit=False), value=8.0).by_label["main"]
    assert plan.lens == (5,), "the step sees its own tokens"
    assert cache.stored_len("a") == 3
    assert in_flight(cache) == []
    again = run(cache, kv_step(("a", 2)), value=4.0).by_label["main"]
    assert torch.equal(again.slots, plan.slots), "the next step writes over them"
    assert stored(cache, "a") == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_labels_are_streams_of_their_own():
    cache = opened(make_cache(8), "a")
    step, ctx = kv_step(("a", 3), ("a", 5, "image")), context("a")
    assert cache.admit(step, ctx).ok
    plan = cache.plan(step, ctx)
    cache.commit(step, ctx)
    assert lengths(cache, "a") == {"main": 3, "image": 5}
    assert set(plan.by_label) == {"main", "image"}
    pages = [set(plan.by_label[label].page_table[0].tolist()) for label in ("main", "image")]
    assert not pages[0] & pages[1] - {0}


def test_removal_frees_every_label_and_tolerates_unknown_ids():
    cache = opened(make_cache(8), "a", "b")
    run(cache, kv_step(("a", 5), ("a", 5, "image"), ("b", 1)))
    cache.remove_request("nobody")
    cache.remove_request("a")
    cache.remove_request("a")
    assert cache.num_free_pages == 7
    assert not cache.at_rest()
    cache.remove_request("b")
    assert cache.at_rest()


def test_a_second_ingest_changes_nothing():
    cache = opened(make_cache(8), "a")
    run(cache, kv_step(("a", 5)), value=1.0)
    cache.ingest_request("a", None)
    assert cache.stored_len("a") == 5
    assert stored(cache, "a") == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_publish_says_the_committed_lengths():
    cache = opened(make_cache(8), "a")
    assert lengths(cache, "a") == {}
    step, ctx = kv_step(("a", 5)), context("a")
    cache.admit(step, ctx)
    assert lengths(cache, "a") == {"main": 0}, "admitted is not committed"
    cache.commit(step, ctx)
    assert lengths(cache, "a") == {"main": 5}
    assert lengths(cache, "nobody") == {}
    assert cache.stored_len("nobody") == cache.stored_len("a", "nowhere") == 0


def test_a_sequence_beyond_the_limit_can_never_be_admitted():
    cache = opened(make_cache(8, max_seq_len=6), "a", "b")
    run(cache, kv_step(("a", 5)))
    outcome = cache.admit(kv_step(("b", 1), ("a", 2)), context("a", "b"))
    assert isinstance(outcome.reason, AdmitRuntimeError)
    assert outcome.reason.request_id == "a"
    assert "7 tokens exceed the cache's sequence limit 6" in outcome.reason.message
    assert cache.num_free_pages == 6
    run(cache, kv_step(("a", 1)))


def test_generations_count_commits():
    cache = opened(make_cache(8), "a")
    generations = []
    for step in (kv_step(("a", 2)), kv_step(("a", 1), commit=False), kv_step(("a", 0))):
        run(cache, step)
        generations.append(cache._table.streams["a"]["main"].generation)
    assert generations == [1, 1, 1]


def test_release_frees_the_memory_and_restore_takes_it_again_empty():
    cache = opened(make_cache(8), "a")
    run(cache, kv_step(("a", 5)), value=1.0)
    cache.remove_request("a")
    tensors = [weakref.ref(part) for layer in range(2) for part in cache.layer(layer)]
    cache.release(frozenset({"weights"}))
    assert all(tensor() is not None for tensor in tensors)
    for _ in range(2):
        cache.release(frozenset({"weights", KV_TAG}))
        assert all(tensor() is None for tensor in tensors), "nobody holds the memory any more"
    opened(cache, "b")
    outcome = cache.admit(kv_step(("b", 1)), context("b"))
    assert isinstance(outcome.reason, AdmitRuntimeError)
    assert "released; restore it first" in outcome.reason.message
    cache.restore(frozenset({"weights"}))
    assert not cache.admit(kv_step(("b", 1)), context("b")).ok
    for _ in range(2):
        cache.restore(frozenset({KV_TAG}))
        restored = [part for layer in range(2) for part in cache.layer(layer)]
    assert all(not tensor.any() for tensor in restored), "finite and empty"
    run(cache, kv_step(("b", 5)), value=3.0)
    cache.restore(frozenset({KV_TAG}))
    assert stored(cache, "b") == [3.0, 4.0, 5.0, 6.0, 7.0], "a repeated restore wipes nothing"


def test_release_refuses_while_a_request_is_there():
    cache = opened(make_cache(8), "a")
    with pytest.raises(AssertionError, match="no request holds"):
        cache.release(frozenset({KV_TAG}))
    assert cache.layer(0)[0].untyped_storage().nbytes() > 0


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4),
)
def test_what_fits_is_admitted_and_what_does_not_is_refused(num_pages, sizes):
    """`fits` and `admit` agree on requests that hold `held` tokens and want `more`."""
    cache = make_cache(num_pages)
    rids = [str(index) for index in range(len(sizes))]
    opened(cache, *rids)
    for rid, (held, _) in zip(rids, sizes, strict=True):
        step, ctx = kv_step((rid, held)), context(rid)
        if not cache.admit(step, ctx).ok:
            return
        cache.plan(step, ctx)
        cache.commit(step, ctx)
    totals = {rid: held + more for rid, (held, more) in zip(rids, sizes, strict=True)}
    fits = cache.fits(totals)
    step = kv_step(*((rid, more) for rid, (_, more) in zip(rids, sizes, strict=True)))
    ctx = context(*rids)
    before = cache.num_free_pages
    assert cache.admit(step, ctx).ok is fits
    cache.unadmit(step, ctx)
    assert cache.num_free_pages == before


def test_fits_counts_requests_that_are_not_here_yet():
    cache = opened(make_cache(3), "a")
    run(cache, kv_step(("a", 4)))
    assert cache.fits({"a": 4, "new": 8})
    assert not cache.fits({"a": 5, "new": 8})
    assert cache.fits({})


@pytest.mark.parametrize("admitted", [False, True])
def test_fits_counts_every_stream_whether_or_not_its_next_step_is_admitted(admitted):
    cache = opened(make_cache(8), "a")
    run(cache, kv_step(("a", 8), ("a", 8, "again")))
    if admitted:
        assert cache.admit(kv_step(("a", 1), ("a", 1, "again")), context("a")).ok
    assert cache.fits({"a": 9, "new": 8})
    assert not cache.fits({"a": 9, "new": 9})


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 6), st.booleans()), max_size=30))
def test_no_page_is_ever_held_twice_or_lost(steps):
    cache = opened(make_cache(6), *"abc")
    for rid, span, drop in steps:
        step, ctx = kv_step((rid, span)), context(rid)
        if cache.admit(step, ctx).ok:
            cache.plan(step, ctx)
            cache.commit(step, ctx)
        if drop:
            cache.remove_request(rid)
            cache.ingest_request(rid, None)
        held = [
            stream.pages.tolist()
            for one in cache._table.streams.values()
            for stream in one.values()
        ]
        pages = list(itertools.chain(*held)) + list(cache._pool._free)
        assert sorted(pages) == [1, 2, 3, 4, 5, 6]
    for rid in "abc":
        cache.remove_request(rid)
    assert cache.at_rest()


def test_a_stream_keeps_its_pages_in_order_as_it_grows():
    stream = CacheStream()
    for first in range(1, 41, 4):
        stream.append(range(first, first + 4))
    assert stream.pages.tolist() == list(range(1, 41))
    assert stream.pages.dtype == np.int32
    assert stream.cut(38) == [39, 40]
    assert stream.cut(50) == []
    assert stream.num_pages == 38
