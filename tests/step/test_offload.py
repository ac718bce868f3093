"""Streams that go to host memory and back: what moves, what stays, and what a race leaves behind."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.step.declaration import Fork
from phalanx.step.outcomes import AllocationFailed, RequestOffloading
from phalanx.step.resources.cache_stream import Residence
from phalanx.step.resources.host_pages import HostPages
from tests.step.caches import context, kv_step, make_cache, planned, run, stored


def holding(*, num_pages=8, host_pages=8, make_host=HostPages, **lengths):
    """A cache in which each request has stored so many tokens."""
    cache = make_cache(num_pages, host_pages=host_pages, make_host=make_host)
    for index, (rid, length) in enumerate(lengths.items()):
        cache.ingest_request(rid, None)
        run(cache, kv_step((rid, length)), value=100.0 * index)
    return cache


def host_free(cache) -> int:
    return cache._offload._host.num_free


class Meddling(HostPages):
    """Calls `meddle` in the middle of each copy."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.meddle = lambda: None

    def store(self, device_pages, host_pages):
        super().store(device_pages, host_pages)
        self.meddle()

    def load(self, host_pages, device_pages):
        super().load(host_pages, device_pages)
        self.meddle()


def meddling(meddle, **options):
    cache = holding(make_host=Meddling, **options)
    cache._offload._host.meddle = lambda: meddle(cache)
    return cache


def test_item_8_5_5_a_request_goes_to_the_host_and_comes_back_to_other_pages():
    cache = holding(a=9, b=4)
    before = stored(cache, "a")
    assert cache.reclaimable("a") == 3
    assert cache.offload_priority("a") == 3.0
    assert cache.offload("a") == 3
    assert (cache.num_free_pages, host_free(cache)) == (7, 5)
    assert cache.is_offloaded("a")
    assert not cache.is_offloaded("b")
    assert (cache.reclaimable("a"), cache.offload("a")) == (0, 0)
    assert cache.stored_len("a") == 9
    run(cache, kv_step(("b", 12)), value=500.0)
    assert cache.reload("a")
    assert not cache.is_offloaded("a")
    assert stored(cache, "a") == before
    assert (cache.num_free_pages, host_free(cache)) == (1, 8)
    run(cache, kv_step(("a", 1)), value=77.0)
    assert stored(cache, "a") == [*before, 77.0]
    for rid in "ab":
        cache.remove_request(rid)
    assert cache.at_rest()


def test_without_host_pages_nothing_moves():
    cache = holding(host_pages=0, a=9)
    assert cache.reclaimable("a") == 3
    assert cache.offload("a") == 0
    assert not cache.is_offloaded("a")
    assert cache.offload("nobody") == cache.reclaimable("nobody") == 0
    assert cache.reload("a"), "it is here"


def test_item_8_5_5_a_request_whose_step_is_in_flight_does_not_move():
    cache = holding(a=4)
    run(cache, kv_step(("a", 2, "image")))
    step, ctx = kv_step(("a", 1, "image")), context("a")
    assert cache.admit(step, ctx).ok
    assert cache.offload("a") == 0, "no stream of it, also not those that the step leaves alone"
    assert host_free(cache) == 8
    planned(cache, step, ctx)
    cache.commit(step, ctx)
    assert cache.offload("a") == 2


def test_defect_8_6_4_a_step_that_is_given_up_leaves_its_request_movable():
    cache = holding(a=4)
    step, ctx = kv_step(("a", 1)), context("a")
    assert cache.admit(step, ctx).ok
    planned(cache, step, ctx)
    cache.unadmit(step, ctx)
    assert cache.offload("a") == 1


def test_defect_8_6_1_a_refused_step_leaves_its_requests_movable():
    cache = holding(num_pages=3, a=4, b=4)
    assert not cache.admit(kv_step(("a", 4), ("b", 4)), context("a", "b")).ok
    assert cache.offload("a") == 1


@pytest.mark.parametrize(
    "step",
    [
        kv_step(("b", 1), ("a", 1)),
        kv_step(("a", 0)),
        kv_step(("a", 1, "x"), pre_forks=(Fork("a", "main", "x"),)),
        kv_step(("b", 1), post_forks=(Fork("a", "main", "x"),)),
        kv_step(("b", 1), post_forks=(Fork("a", "x", "main"),)),
    ],
)
def test_item_8_5_7_a_step_on_an_offloaded_stream_is_refused_and_takes_nothing(step):
    cache = holding(a=5, b=4)
    run(cache, kv_step(("a", 1, "x")))
    cache.offload("a")
    before = cache.num_free_pages
    outcome = cache.admit(step, context("a", "b"))
    assert isinstance(outcome.reason, RequestOffloading)
    assert outcome.reason.request_id == "a"
    assert "is offloaded; reload it first" in outcome.reason.message
    assert cache.num_free_pages == before
    cache.reload("a")
    assert cache.admit(step, context("a", "b")).ok


def test_item_8_5_5_a_stream_for_which_the_host_has_no_room_stays():
    cache = holding(host_pages=2, a=9)
    run(cache, kv_step(("a", 5, "image")), value=50.0, label="image")
    main, image = stored(cache, "a"), stored(cache, "a", "image")
    assert cache.offload("a") == 2
    assert cache.is_offloaded("a")
    assert cache.reclaimable("a") == 3
    assert stored(cache, "a") == main, "this one is still here"
    assert isinstance(cache.admit(kv_step(("a", 1, "image")), context()).reason, RequestOffloading)
    assert cache.reload("a")
    assert stored(cache, "a", "image") == image
    assert host_free(cache) == 2


def test_item_8_5_5_reloading_needs_all_pages_at_once():
    cache = holding(num_pages=5, a=8)
    run(cache, kv_step(("a", 8, "image")), value=50.0, label="image")
    main, image = stored(cache, "a"), stored(cache, "a", "image")
    assert cache.offload("a") == 4
    cache.ingest_request("b", None)
    run(cache, kv_step(("b", 8)))
    assert not cache.reload("a")
    assert (cache.num_free_pages, host_free(cache)) == (3, 4), "nothing was taken"
    cache.remove_request("b")
    assert cache.reload("a")
    assert (stored(cache, "a"), stored(cache, "a", "image")) == (main, image)


def test_pages_beyond_what_is_stored_are_freed_and_not_copied():
    cache = holding(a=4)
    run(cache, kv_step(("a", 4), commit=False))
    run(cache, kv_step(("a", 4, "x"), commit=False))
    assert cache.offload("a") == 3
    assert host_free(cache) == 7
    assert cache.reload("a")
    assert cache.num_free_pages == 7
    assert stored(cache, "a") == [0.0, 1.0, 2.0, 3.0]


def test_removal_frees_the_host_too():
    cache = holding(a=9, b=3)
    cache.offload("a")
    cache.remove_request("a")
    assert host_free(cache) == 8
    cache.offload("b")
    assert not cache.at_rest()
    cache.ingest_request("a", None)
    assert cache.stored_len("a") == 0
    for rid in "ab":
        cache.remove_request(rid)
    assert cache.at_rest()


def test_item_8_5_5_a_stream_that_changes_under_the_copy_abandons_the_move():
    def meddle(cache):
        step, ctx = kv_step(("a", 1)), context("a")
        assert isinstance(cache.admit(step, ctx).reason, RequestOffloading), "it is claimed"
        cache.commit(step, ctx)  # of a step that was admitted before the claim

    cache = meddling(meddle, a=5)
    run(cache, kv_step(("a", 5, "image")), value=50.0, label="image")
    image = stored(cache, "a", "image")
    assert cache.offload("a") == 0
    assert not cache.is_offloaded("a"), "every claim is given up, that of the other stream too"
    assert (cache.num_free_pages, host_free(cache)) == (4, 8)
    assert cache.stored_len("a") == 7, "two copies, and a token came under each"
    assert stored(cache, "a", "image") == image
    cache.remove_request("a")
    assert cache.at_rest()


@pytest.mark.parametrize("again", [True, False])
def test_item_8_5_5_a_request_that_is_removed_under_the_copy_leaves_nothing(again):
    def meddle(cache):
        cache.remove_request("a")
        if again:
            cache.ingest_request("a", None)
            run(cache, kv_step(("a", 4)), value=9.0)

    cache = meddling(meddle, a=5)
    assert cache.offload("a") == 0
    assert host_free(cache) == 8
    assert cache.num_free_pages == (7 if again else 8)
    cache.remove_request("a")
    assert cache.at_rest()


def test_item_8_5_5_a_request_that_is_removed_while_it_comes_back_leaves_nothing():
    cache = meddling(lambda cache: None, a=5)
    cache.offload("a")
    cache._offload._host.meddle = lambda: cache.remove_request("a")
    assert not cache.reload("a")
    assert cache.at_rest()


def test_a_request_on_its_way_is_left_alone():
    seen = []

    def meddle(cache):
        seen.append((cache.is_offloaded("a"), cache.offload("a"), cache.reload("a")))

    cache = meddling(meddle, a=5)
    assert cache.offload("a") == 2
    assert cache.reload("a")
    assert seen == [(True, 0, False)] * 2


def test_a_commit_under_which_the_stream_was_moved_drops_its_tokens_with_a_warning(caplog):
    cache = holding(a=5)
    step, ctx = kv_step(("a", 1), post_forks=(Fork("a", "main", "x"),)), context("a")
    assert cache.admit(step, ctx).ok
    planned(cache, step, ctx)
    for stream in cache._table.streams["a"].values():
        stream.step_in_flight = False  # what nobody may do
    assert cache.offload("a") == 4
    with caplog.at_level(logging.WARNING):
        cache.commit(step, ctx)
    assert "dropped 1 tokens of request 'a'" in caplog.text
    assert cache.stored_len("a") == 5
    assert cache.reload("a")
    assert stored(cache, "a") == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_what_must_be_reloaded_is_counted_by_fits():
    cache = holding(num_pages=4, a=8)
    assert cache.fits({"a": 8, "b": 8})
    assert not cache.fits({"a": 8, "b": 9})
    cache.offload("a")
    assert cache.fits({"b": 16})
    assert cache.fits({"a": 8, "b": 8})
    assert not cache.fits({"a": 8, "b": 9})


class Model:
    """Knows each stream's tokens, and does to a cache what it is told."""

    def __init__(self, num_pages: int, host_pages: int) -> None:
        self.cache = make_cache(num_pages, host_pages=host_pages)
        self.tokens: dict[str, dict[str, list[float]]] = {rid: {} for rid in "abc"}
        self.num_values = 0
        for rid in "abc":
            self.cache.ingest_request(rid, None)

    def step(self, rid, label, span):
        step, ctx = kv_step((rid, span, label)), context(rid)
        outcome = self.cache.admit(step, ctx)
        if not outcome.ok:
            assert isinstance(outcome.reason, AllocationFailed | RequestOffloading)
            return
        self.cache.unadmit(step, ctx)
        run(self.cache, step, value=float(self.num_values), label=label)
        new = range(self.num_values, self.num_values + span)
        self.tokens[rid].setdefault(label, []).extend(map(float, new))
        self.num_values += span

    def offload(self, rid, label, span):
        before = self.cache.num_free_pages
        assert self.cache.offload(rid) == self.cache.num_free_pages - before

    def reload(self, rid, label, span):
        assert self.cache.reload(rid) is not self.cache.is_offloaded(rid)

    def remove(self, rid, label, span):
        self.cache.remove_request(rid)
        self.cache.ingest_request(rid, None)
        self.tokens[rid] = {}

    def check(self):
        for rid, streams in self.tokens.items():
            for label, tokens in streams.items():
                assert self.cache.stored_len(rid, label) == len(tokens)
                if self.cache._table.streams[rid][label].residence is Residence.DEVICE:
                    assert stored(self.cache, rid, label) == tokens


CALLS = st.tuples(
    st.sampled_from([Model.step, Model.step, Model.offload, Model.reload, Model.remove]),
    st.sampled_from("abc"),
    st.sampled_from(["main", "image"]),
    st.integers(0, 9),
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.integers(2, 8), st.integers(0, 6), st.lists(CALLS, max_size=30))
def test_item_8_5_13_whatever_moves_no_token_and_no_page_is_lost(num_pages, host_pages, calls):
    model = Model(num_pages, host_pages)
    for call, *given_to in calls:
        call(model, *given_to)
        model.check()
    for rid in "abc":
        model.cache.remove_request(rid)
    assert model.cache.at_rest()
