"""Requests that begin alike read the same pages, and none of them writes to one."""

from __future__ import annotations

import pytest
import torch

from phalanx.device.cpu import CpuBackend
from phalanx.step.declaration import Fork
from phalanx.step.outcomes import AdmitRuntimeError
from phalanx.step.prefixes import Prefixes
from phalanx.step.resources.base import BuildInfo, Resource
from phalanx.step.resources.kv_cache import KV_TAG, KVRequestConfig
from phalanx.step.resources.positions import PositionScheme, PositionSpec
from tests.step.caches import context, kv_step, make_cache, planned, run, stored

TOKENS = tuple(range(100, 130))


def opened(cache, rid, tokens=TOKENS, **options):
    cache.ingest_request(rid, KVRequestConfig(tokens, **options))


def computed(cache, rid, span, value=None):
    """Compute `span` tokens, which store what belongs to their places."""
    start = cache.stored_len(rid)
    return run(cache, kv_step((rid, span)), 100.0 + start if value is None else value)


@pytest.fixture
def cache():
    """Of 16 pages of 4 tokens; request `a` has computed 10 of its 30 tokens."""
    cache = make_cache(16)
    opened(cache, "a")
    computed(cache, "a", 10)
    return cache


def test_a_second_request_holds_the_committed_whole_pages(cache):
    opened(cache, "b")
    free = cache.num_free_pages
    assert cache.adopt("b") == 8
    assert cache.num_free_pages == free
    assert cache.stored_len("b") == 8
    assert stored(cache, "b") == stored(cache, "a")[:8]
    assert cache.adopt("b") == 0, "nothing more is known"


def test_nobody_writes_to_a_page_that_another_holds(cache):
    opened(cache, "b")
    cache.adopt("b")
    before = stored(cache, "a")
    plan = computed(cache, "b", 6, value=500.0)
    shared = cache._table.find("a", "main").pages[:2].tolist()
    assert not {slot // 4 for slot in plan.by_label["main"].slots.tolist()} & set(shared)
    assert stored(cache, "a") == before
    assert stored(cache, "b") == [*before[:8], *(500.0 + i for i in range(6))]


def test_what_an_ended_request_computed_stays_until_the_room_is_needed(cache):
    cache.remove_request("a")
    assert cache.num_free_pages == 16
    assert cache.cached_tokens == 8
    assert cache.at_rest()
    opened(cache, "b")
    assert cache.adopt("b") == 8
    assert cache.num_free_pages == 14
    cache.remove_request("b")
    opened(cache, "big", tuple(range(64)))
    run(cache, kv_step(("big", 64)))
    assert cache.cached_tokens == 0
    cache.remove_request("big")
    opened(cache, "c")
    assert cache.adopt("c") == 0


def test_the_last_token_is_always_computed():
    cache = make_cache(8)
    opened(cache, "a", TOKENS[:8])
    computed(cache, "a", 8)
    for length, adopted in ((8, 4), (9, 8), (5, 4), (4, 0), (1, 0)):
        rid = f"of {length}"
        opened(cache, rid, TOKENS[:length])
        assert cache.adopt(rid) == adopted


def test_what_is_to_be_computed_is_not_taken_over(cache):
    for reusable, adopted in ((7, 4), (8, 8), (3, 0), (0, 0), (100, 8), (None, 8)):
        rid = f"up to {reusable}"
        opened(cache, rid, reusable=reusable)
        assert cache.adopt(rid) == adopted


def test_other_tokens_and_other_salts_share_nothing(cache):
    opened(cache, "other start", (99, *TOKENS[1:]))
    opened(cache, "other salt", salt="v2")
    opened(cache, "other end", (*TOKENS[:7], 99, *TOKENS[8:]))
    cache.ingest_request("unknown", None)
    assert cache.adopt("other start") == cache.adopt("other salt") == cache.adopt("unknown") == 0
    assert cache.adopt("other end") == 4


def test_a_partly_computed_page_gives_way_to_the_whole_one(cache):
    opened(cache, "b")
    computed(cache, "b", 6)
    free = cache.num_free_pages
    assert cache.adopt("b") == 2
    assert cache.num_free_pages == free + 1
    assert stored(cache, "b") == stored(cache, "a")[:8]


def test_pages_become_known_when_they_are_committed_and_not_before():
    cache = make_cache(16)
    opened(cache, "a")
    opened(cache, "b")
    step, ctx = kv_step(("a", 9)), context("a")
    assert cache.admit(step, ctx).ok
    planned(cache, step, ctx)
    assert cache.adopt("b") == 0
    cache.commit(step, ctx)
    assert cache.adopt("b") == 8


def test_a_step_that_commits_nothing_makes_nothing_known():
    cache = make_cache(16)
    opened(cache, "a")
    opened(cache, "b")
    run(cache, kv_step(("a", 9), commit=False))
    assert cache.adopt("b") == 0


def test_a_step_under_way_keeps_its_pages(cache):
    """Also where it fits into the page that would give way."""
    for rid, start, span in (("b", 0, 2), ("c", 5, 2)):
        opened(cache, rid)
        if start:
            computed(cache, rid, start)
        step, ctx = kv_step((rid, span)), context(rid)
        assert cache.admit(step, ctx).ok
        assert cache.adopt(rid) == 0
        cache.unadmit(step, ctx)
        assert cache.adopt(rid) == 8 - start


def test_two_that_computed_the_same_hold_pages_of_their_own(cache):
    opened(cache, "b")
    computed(cache, "b", 10)
    for rid in ("a", "b"):
        cache.remove_request(rid)
    assert (cache.num_free_pages, cache.cached_tokens) == (16, 8)


def test_what_was_produced_becomes_known_at_the_end():
    cache = make_cache(16)
    tokens = list(TOKENS[:5])
    opened(cache, "a", tokens)
    computed(cache, "a", 5)
    for token in TOKENS[5:12]:
        tokens.append(token)
        computed(cache, "a", 1)
    opened(cache, "b")
    assert cache.adopt("b") == 4
    cache.remove_request("a")
    assert cache.adopt("b") == 8
    assert stored(cache, "b") == [100.0 + place for place in range(12)]


def test_tokens_that_the_cache_does_not_know_end_what_is_kept():
    """A request that ends holds one token more than it has told."""
    cache = make_cache(16)
    opened(cache, "a", TOKENS[:7])
    computed(cache, "a", 8)
    cache.remove_request("a")
    assert cache.cached_tokens == 4


def test_all_is_forgotten_at_once(cache):
    opened(cache, "b")
    cache.adopt("b")
    cache.forget()
    opened(cache, "c")
    assert cache.adopt("c") == 0
    computed(cache, "b", 8)
    for rid in ("a", "b", "c"):
        cache.remove_request(rid)
    assert cache.cached_tokens == 0, "what was computed before it ended is not kept either"
    assert cache.num_free_pages == 16


def test_memory_that_is_given_back_holds_nothing(cache):
    cache.remove_request("a")
    cache.release(frozenset({KV_TAG}))
    cache.restore(frozenset({KV_TAG}))
    opened(cache, "b")
    assert cache.adopt("b") == 0
    assert cache.cached_tokens == 0


def test_a_cache_can_be_told_not_to_share():
    cache = make_cache(16, prefix_cache=False)
    for rid in ("a", "b"):
        opened(cache, rid)
        computed(cache, rid, 10)
    assert cache.adopt("b") == 0
    cache.remove_request("a")
    assert cache.cached_tokens == 0


def test_no_fork_overwrites_what_others_may_hold(cache):
    fork = Fork("a", "other", "main")
    outcome = cache.admit(kv_step(("a", 0, "other"), pre_forks=(fork,)), context("a"))
    assert isinstance(outcome.reason, AdmitRuntimeError)
    assert "KVRequestConfig" in outcome.reason.message
    run(cache, kv_step(("a", 1), post_forks=(Fork("a", "main", "other"),)))
    assert stored(cache, "a", "other")[:10] == stored(cache, "a")[:10]


def test_moving_a_request_to_the_host_frees_what_it_holds_alone():
    cache = make_cache(16, host_pages=16)
    opened(cache, "a")
    computed(cache, "a", 10)
    opened(cache, "b")
    cache.adopt("b")
    before = computed(cache, "b", 3) and stored(cache, "b")
    assert cache.reclaimable("b") == 1
    assert cache.offload("b") == 1
    assert stored(cache, "a") == [100.0 + place for place in range(10)]
    assert cache.adopt("b") == 0
    assert cache.reload("b")
    assert stored(cache, "b") == before


def test_room_is_counted_with_what_is_kept(cache):
    cache.remove_request("a")
    opened(cache, "b")
    assert cache.fits({"b": 64})
    assert not cache.fits({"b": 65})
    cache.adopt("b")
    assert cache.fits({"b": 64})
    assert not cache.fits({"b": 65})


class Plain(Resource):
    """Has nothing to do with tokens."""


def test_a_node_skips_tokens_where_all_of_its_resources_can(cache):
    def positions(scheme):
        return PositionSpec("positions", frozenset({"node"}), scheme).build(BuildInfo(CpuBackend()))

    sequential, block = map(positions, PositionScheme)
    opened(cache, "b")
    for one in (sequential, block):
        one.ingest_request("b", None)
    resources = {"kv": cache, "sequential": sequential, "block": block, "plain": Plain()}
    nodes = {"able": ["kv", "sequential", "plain"], "unable": ["kv", "block"], "other": ["plain"]}
    prefixes = Prefixes(resources, nodes)
    assert prefixes.adopt("unable", "b") == prefixes.adopt("other", "b") == 0
    assert cache.stored_len("b") == 0
    assert prefixes.adopt("able", "b") == 8
    assert sequential.publish("b") == {"main": 8}
    prefixes.forget()
    opened(cache, "c")
    sequential.ingest_request("c", None)
    assert prefixes.adopt("able", "c") == 0


def test_two_resources_that_know_tokens_would_have_to_agree(cache):
    opened(cache, "b")
    prefixes = Prefixes({"kv": cache, "other": make_cache()}, {"node": ["kv", "other"]})
    assert prefixes.adopt("node", "b") == 0


def test_pages_are_read_in_the_order_of_the_tokens(cache):
    opened(cache, "b")
    cache.adopt("b")
    plan = computed(cache, "b", 3)
    table = plan.by_label["main"].page_table
    assert table.tolist()[0][:2] == cache._table.find("a", "main").pages[:2].tolist()
    assert plan.starts["main"] == (8,)
    assert torch.equal(plan.by_label["main"].kv_lens, torch.tensor([11], dtype=torch.int32))


def test_other_streams_of_a_request_are_shared_as_its_default_one():
    cache = make_cache(16)
    for rid in ("a", "b"):
        opened(cache, rid, TOKENS[:9], others={"away": TOKENS[10:19]}, labels=("main", "away"))
        if rid == "b":
            assert cache.adopt("b") == 16
            assert (cache.stored_len("b"), cache.stored_len("b", "away")) == (8, 8)
            pages = [
                [cache.pages(one, label, 8).pages for one in "ab"] for label in ("main", "away")
            ]
            assert all(first == second for first, second in pages)
            break
        for label in ("main", "away"):
            run(cache, kv_step(("a", 9, label)))
    # What the one stream was asked, the other may be asked by somebody else.
    opened(cache, "c", TOKENS[10:19], others={"away": TOKENS[:9]})
    assert cache.adopt("c") == 16
    for rid in "abc":
        cache.remove_request(rid)
    assert cache.at_rest()


def test_the_last_token_of_every_stream_is_computed():
    cache = make_cache(16)
    for rid in ("a", "b"):
        opened(cache, rid, TOKENS[:8], others={"away": TOKENS[10:18]})
        if rid == "b":
            assert cache.adopt("b") == 8
            assert cache.stored_len("b") == cache.stored_len("b", "away") == 4
            break
        for label in ("main", "away"):
            run(cache, kv_step(("a", 8, label)))
