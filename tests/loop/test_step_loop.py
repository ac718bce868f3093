"""What a loop tells of its requests, and how each of them ends."""

from __future__ import annotations

import pytest

from phalanx.errors import RequestFailedError
from phalanx.schema.events import Delta, Failed, Final, Scheduled
from phalanx.testing.probe_resource import ProbeSpec
from phalanx.testing.step_models import CacheReader
from phalanx.testing.token_request import NODE
from tests.loop.ledger import bench_of, expected, prompt_of


def test_a_request_from_start_to_end():
    bench = bench_of(tokens=4)
    bench.start("a", 6, 3)
    assert (bench.loop.num_waiting, bench.loop.busy, bench.loop.idle) == (1, True, False)
    tokens = expected(bench, "a")
    assert bench.tick() == [Scheduled("a")], "four of six tokens"
    assert bench.cache.stored_len("a") == 4
    assert bench.tick() == [Delta("a", tokens[:1])]
    assert bench.tick() == [Delta("a", tokens[1:2])]
    assert bench.tick() == [Delta("a", tokens[2:]), Final("a", tokens)]
    assert bench.engine.at_rest()
    assert (bench.loop.busy, bench.loop.idle) == (False, True)
    assert bench.tick() == []
    assert bench.loop.num_steps == 4


def test_a_request_that_wants_nothing_ends_at_once():
    bench = bench_of()
    bench.start("a", 6, 0)
    assert bench.loop.busy
    assert bench.tick() == [Final("a", ())]
    assert bench.engine.at_rest()


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("tokens", [1, 3, 16, 500])
def test_requests_together_give_what_each_gives_alone(tokens, batched):
    bench = bench_of(node=CacheReader(batched=batched), tokens=tokens, running=5)
    for index in range(9):
        bench.start(f"r{index}", 1 + 5 * index, 1 + index % 4)
    bench.finish()
    for rid in bench.states:
        assert bench.output(rid) == expected(bench, rid)


def test_a_node_with_a_largest_batch_is_never_given_more():
    node = CacheReader(max_rows=2)
    bench = bench_of(node=node)
    for index in range(5):
        bench.start(f"r{index}", 3, 4)
    while bench.loop.busy:
        bench.tick()
        assert bench.loop.last_batch_size <= 2
    for rid in bench.states:
        assert bench.output(rid) == expected(bench, rid)


def test_a_request_id_can_be_used_again():
    bench = bench_of()
    for length in (5, 3):
        bench.start("a", length, 2)
        bench.finish()
        assert bench.output("a") == expected(bench, "a")


def test_higher_priority_starts_first():
    bench = bench_of(running=1)
    bench.start("low", 4, 2)
    bench.start("high", 4, 2, priority=5)
    bench.start("low too", 4, 2)
    bench.start("higher", 4, 2, priority=9)
    bench.finish()
    assert bench.ledger.order == ["higher", "high", "low", "low too"]


def test_cancelling_a_waiting_a_prefilling_and_a_decoding_request():
    bench = bench_of(tokens=8, running=3)
    bench.start("decoding", 4, 9)
    bench.tick()
    bench.start("prefilling", 40, 9)
    bench.tick()
    bench.start("also", 4, 2)
    bench.start("waiting", 4, 9)
    bench.tick()
    assert (bench.loop.num_running, bench.loop.num_waiting) == (3, 1)
    assert 0 < bench.states["prefilling"].computed < 40
    for rid in ("waiting", "prefilling", "decoding"):
        bench.loop.cancel(rid)
        bench.loop.cancel(rid)
    bench.loop.cancel("nobody")
    assert bench.loop.busy
    assert bench.cache.stored_len("prefilling") == 0
    bench.finish()
    for rid in ("waiting", "prefilling", "decoding"):
        event = bench.ledger.ended[rid]
        assert isinstance(event, Final)
        assert event.cancelled
        assert event.payload == expected(bench, rid)[: len(event.payload)]
    assert len(bench.output("decoding")) == 3
    assert bench.output("also") == expected(bench, "also")
    assert "waiting" not in bench.ledger.scheduled


def test_a_cancel_after_the_end_says_nothing_more():
    bench = bench_of()
    bench.start("a", 2, 1)
    bench.tick()
    bench.loop.cancel("a")
    assert not bench.loop.busy
    assert bench.tick() == []


def test_cancel_all_ends_everybody():
    bench = bench_of(running=1)
    for rid in "abc":
        bench.start(rid, 3, 5)
    bench.tick()
    bench.loop.cancel_all()
    events = bench.tick()
    assert [(event.rid, event.cancelled) for event in events] == [(r, True) for r in "abc"]
    assert bench.engine.at_rest()


def test_drop_ends_without_a_word_and_fail_with_an_error():
    bench = bench_of()
    for rid in "abc":
        bench.start(rid, 3, 5)
    bench.tick()
    bench.loop.drop("a")
    bench.loop.fail("b", ValueError("told so"))
    bench.loop.drop("nobody")
    bench.loop.fail("nobody", ValueError())
    bench.ledger.live.discard("a")
    bench.finish()
    assert "a" not in bench.ledger.ended
    assert str(bench.error("b")) == "told so"
    assert bench.output("c") == expected(bench, "c")


def test_a_paused_loop_computes_nothing_and_still_reports():
    bench = bench_of()
    bench.start("a", 3, 4)
    bench.tick()
    bench.loop.paused = True
    assert not bench.loop.busy
    assert bench.tick() == []
    bench.start("b", 3, 4)
    bench.loop.cancel("a")
    assert bench.loop.busy
    assert [type(event) for event in bench.tick()] == [Final]
    assert bench.tick() == []
    bench.loop.paused = False
    bench.finish()
    assert bench.output("b") == expected(bench, "b")


def test_push_back_all_frees_everything_and_repeats_no_delta():
    bench = bench_of(tokens=8)
    bench.start("a", 5, 6)
    bench.start("b", 9, 6, priority=1)
    for _ in range(3):
        bench.tick()
    bench.loop.paused = True
    bench.loop.push_back_all()
    assert bench.cache.used_tokens == 0
    assert (bench.loop.num_running, bench.loop.num_waiting) == (0, 2)
    assert bench.engine.at_rest()
    bench.loop.paused = False
    bench.finish()
    assert bench.loop.num_push_backs == 2
    for rid in "ab":
        assert bench.output(rid) == expected(bench, rid)


def test_what_was_pushed_back_is_computed_again_in_one_go():
    bench = bench_of(tokens=64)
    bench.start("a", 9, 6)
    for _ in range(3):
        bench.tick()
    bench.loop.push_back_all()
    bench.tick()
    assert bench.states["a"].computed == 12
    bench.finish()


def test_the_youngest_is_pushed_back_when_requests_outgrow_the_pool():
    bench = bench_of(num_pages=4, page_size=2)
    for rid in ("old", "young"):
        bench.start(rid, 2, 6)
    bench.finish()
    assert bench.loop.num_push_backs >= 1
    assert bench.states["old"].num_push_backs == 0
    assert bench.states["young"].num_push_backs >= 1
    assert bench.ledger.order == ["old", "young"]
    for rid in ("old", "young"):
        assert bench.output(rid) == expected(bench, rid)


def test_the_lowest_priority_is_pushed_back_though_it_came_first():
    bench = bench_of(num_pages=4, page_size=2)
    bench.start("low", 2, 6)
    bench.start("high", 2, 6, priority=1)
    bench.finish()
    assert bench.states["high"].num_push_backs == 0
    assert bench.states["low"].num_push_backs >= 1
    assert bench.output("low") == expected(bench, "low")


def test_rows_are_published_after_every_step_also_after_a_refused_one():
    log = []
    bench = bench_of(2, 2, probe=ProbeSpec("probe", frozenset({NODE}), log))
    bench.start("a", 9, 1)
    bench.finish()
    assert isinstance(bench.error("a"), RequestFailedError)
    assert [call.verb for call in log] == ["ingest", "unadmit", "publish", "remove"]


def test_a_skipped_request_waits_without_holding_others_up():
    bench = bench_of()
    bench.start("late", 3, 2, skips=5)
    bench.start("a", 3, 2)
    bench.finish(wakes=6)
    assert bench.ledger.order == ["a", "late"]
    assert bench.output("late") == expected(bench, "late")


def test_a_skipped_request_does_not_keep_the_turn_of_another_walk():
    bench = bench_of()
    bench.start("late", 3, 2, skips=6, place=(NODE, "one"))
    bench.start("a", 3, 3, place=(NODE, "two"))
    bench.finish(wakes=6)
    assert bench.ledger.order == ["a", "late"]


def test_requests_of_two_walks_take_turns():
    bench = bench_of()
    for rid, walk in (("a", "one"), ("b", "two"), ("c", "one")):
        bench.start(rid, 3, 3, place=(NODE, walk))
    order = [[event.rid for event in bench.tick() if isinstance(event, Delta)] for _ in range(4)]
    assert order == [["a", "c"], ["b"], ["a", "c"], ["b"]]
    bench.finish()
    for rid in "abc":
        assert bench.output(rid) == expected(bench, rid)


def test_a_request_started_twice_is_our_own_mistake():
    bench = bench_of()
    bench.start("a", 3, 3)
    with pytest.raises(AssertionError, match="a is already live"):
        bench.loop.start("a", bench.states["a"])


def test_counters_of_a_loop():
    bench = bench_of()
    for rid in "abc":
        bench.start(rid, 4, 2)
    bench.tick()
    assert (bench.loop.num_running, bench.loop.num_waiting) == (3, 0)
    assert (bench.loop.num_steps, bench.loop.last_batch_size) == (1, 3)
    assert bench.cache.used_tokens == 12
    assert prompt_of(4) != prompt_of(4, 1)
    bench.finish()
    assert (bench.loop.num_running, bench.loop.num_waiting) == (0, 0)
    assert isinstance(bench.ledger.ended["a"], Final)
    assert not any(isinstance(event, Failed) for event in bench.ledger.ended.values())
