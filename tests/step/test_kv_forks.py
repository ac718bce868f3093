"""Forks copy a stream with its contents; labels combine into one plan."""

from __future__ import annotations

import pytest

from phalanx.step.declaration import Fork
from tests.step.caches import (
    context,
    in_flight,
    kv_step,
    lengths,
    make_cache,
    planned,
    run,
    stored,
    write,
)


@pytest.fixture
def cache():
    cache = make_cache(16)
    cache.ingest_request("a", None)
    run(cache, kv_step(("a", 5)), value=1.0)
    return cache


def test_a_pre_fork_is_copied_before_the_step(cache):
    step = kv_step(("a", 2, "branch"), pre_forks=(Fork("a", "main", "branch"),))
    plan = run(cache, step, value=6.0, label="branch").by_label["branch"]
    assert plan.lens == (7,)
    assert stored(cache, "a", "branch") == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert stored(cache, "a") == [1.0, 2.0, 3.0, 4.0, 5.0], "the source is as it was"
    assert cache.num_free_pages == 16 - 2 - 2


def test_a_post_fork_has_the_tokens_of_the_step(cache):
    run(cache, kv_step(("a", 4), post_forks=(Fork("a", "main", "kept"),)), value=6.0)
    expected = [float(value) for value in range(1, 10)]
    assert stored(cache, "a", "kept") == stored(cache, "a") == expected
    assert cache.num_free_pages == 16 - 3 - 3


def test_a_fork_is_a_copy_and_not_a_share(cache):
    run(cache, kv_step(("a", 0), post_forks=(Fork("a", "main", "kept"),)))
    run(cache, kv_step(("a", 3)), value=50.0)
    run(cache, kv_step(("a", 1, "kept")), value=90.0, label="kept")
    assert stored(cache, "a") == [1.0, 2.0, 3.0, 4.0, 5.0, 50.0, 51.0, 52.0]
    assert stored(cache, "a", "kept") == [1.0, 2.0, 3.0, 4.0, 5.0, 90.0]


def test_a_fork_onto_a_longer_stream_cuts_what_is_seen(cache):
    run(cache, kv_step(("a", 11, "long")), value=100.0, label="long")
    run(cache, kv_step(("a", 0, "long"), pre_forks=(Fork("a", "main", "long"),)))
    assert stored(cache, "a", "long") == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert cache.num_free_pages == 16 - 2 - 3, "its pages stay: a high-water mark"


def test_a_fork_of_the_same_length_over_the_same_pages_is_another_content(cache):
    """Whoever remembers what it read of the target must read it again."""
    fork = kv_step(("a", 0), post_forks=(Fork("a", "main", "kept"),))
    run(cache, fork)
    before = cache.pages("a", "kept", 5)
    run(cache, fork)
    after = cache.pages("a", "kept", 5)
    assert after.pages == before.pages
    assert after.generation != before.generation


def test_a_fork_of_an_empty_stream_is_empty(cache):
    cache.ingest_request("b", None)
    run(cache, kv_step(("b", 0), post_forks=(Fork("b", "main", "kept"),)))
    assert lengths(cache, "b") == {"main": 0, "kept": 0}


def test_unadmit_takes_back_invented_forks(cache):
    before = cache.num_free_pages
    step = kv_step(
        ("a", 3, "branch"),
        pre_forks=(Fork("a", "main", "branch"),),
        post_forks=(Fork("a", "branch", "kept"),),
    )
    ctx = context("a")
    assert cache.admit(step, ctx).ok
    assert before - cache.num_free_pages == 4
    planned(cache, step, ctx)
    cache.unadmit(step, ctx)
    assert cache.num_free_pages == before
    assert lengths(cache, "a") == {"main": 5}
    assert in_flight(cache) == []


def test_unadmit_takes_a_planned_fork_off_a_stream_that_was_there(cache):
    run(cache, kv_step(("a", 2, "branch")), label="branch")
    step, ctx = kv_step(("a", 3, "branch"), pre_forks=(Fork("a", "main", "branch"),)), context("a")
    assert cache.admit(step, ctx).ok
    assert planned(cache, step, ctx).starts["branch"] == (5,)
    cache.unadmit(step, ctx)
    assert lengths(cache, "a") == {"main": 5, "branch": 2}


def test_a_fork_counts_when_room_is_short():
    cache = make_cache(3)
    cache.ingest_request("a", None)
    run(cache, kv_step(("a", 5)))
    outcome = cache.admit(kv_step(("a", 0), post_forks=(Fork("a", "main", "kept"),)), context("a"))
    assert outcome.reason.pages_short == 1
    assert outcome.reason.label == "kept"
    assert lengths(cache, "a") == {"main": 5}


def test_a_combined_label_lists_its_sources_one_after_another():
    cache = make_cache(16)
    for rid in "ab":
        cache.ingest_request(rid, None)
    run(cache, kv_step(("a", 3), ("b", 4)))
    run(cache, kv_step(("a", 5, "image"), ("b", 2, "image")), label="image")
    step = kv_step(
        ("a", 1),
        ("a", 2, "image"),
        ("b", 1),
        ("b", 2, "image"),
        combined_labels={"guided": ("image", "main")},
    )
    ctx = context("a", "b")
    assert cache.admit(step, ctx).ok
    plan = planned(cache, step, ctx)
    rows = [(row.request_id, row.label) for row in plan.rows["guided"]]
    assert rows == [("a", "image"), ("b", "image"), ("a", "main"), ("b", "main")]
    guided = plan.by_label["guided"]
    assert guided.spans == (2, 2, 1, 1)
    assert guided.lens == (7, 4, 4, 5)
    assert plan.starts["guided"] == (5, 2, 3, 4)
    parts = [plan.by_label["image"], plan.by_label["main"]]
    assert guided.slots.tolist() == [slot for part in parts for slot in part.slots.tolist()]
    write(cache, guided, 60.0)
    cache.commit(step, ctx)
    assert stored(cache, "a", "image")[5:] == [60.0, 61.0]
    assert stored(cache, "b", "main")[4:] == [65.0]
