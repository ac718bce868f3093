"""Requests that wait for something outside: held without a hot loop, and woken."""

from __future__ import annotations

import pytest

from phalanx.errors import RequestFailedError
from phalanx.step.outcomes import (
    AdmitOutcome,
    AdmitRuntimeError,
    AllocationFailed,
    NotReady,
    RequestOffloading,
)
from phalanx.testing.probe_resource import ProbeSpec
from phalanx.testing.token_request import NODE
from tests.loop.ledger import bench_of, expected

NAMED = NotReady("told so", "slow")


class Outside:
    """What requests wait for. `answers` hold until they are changed, by verb."""

    def __init__(self, **options) -> None:
        self.answers: dict[str, AdmitOutcome] = {}
        self.asked: list[tuple[str, tuple[str, ...]]] = []
        self.whose: set[str] | None = None
        probe = ProbeSpec("probe", frozenset({NODE}), react=self.react)
        self.bench = bench_of(probe=probe, **options)

    def react(self, verb, rids):
        if verb in ("admit", "retrieve"):
            self.asked.append((verb, rids))
        if self.whose is not None and self.whose.isdisjoint(rids):
            return None
        return self.answers.get(verb)

    def come(self) -> None:
        """What they wait for is there."""
        self.answers.clear()
        self.bench.engine.waker.wake()

    def rest(self) -> None:
        """Tick for as long as there is something to do."""
        for _ in range(100):
            if not self.bench.loop.busy:
                return
            self.bench.tick()
        raise AssertionError("a hot loop")


@pytest.mark.parametrize("reason", [NAMED, None])
def test_defect_8_6_6_a_step_that_is_not_ready_holds_its_request_and_others_go_on(reason):
    outside = Outside()
    bench = outside.bench
    bench.start("slow", 3, 4)
    bench.start("a", 3, 4)
    outside.answers["admit"] = AdmitOutcome(ready=False, reason=reason)
    outside.whose = {"slow"}
    outside.rest()
    if reason is not None:
        assert bench.output("a") == expected(bench, "a"), "a was not concerned"
    assert "slow" not in bench.ledger.ended
    assert not bench.loop.idle
    asked = sum("slow" in rids for _, rids in outside.asked)
    assert asked == (1 if reason is None else 2), "asked once, and again when a has ended"
    outside.come()
    assert bench.loop.busy
    bench.finish()
    for rid in bench.states:
        assert bench.output(rid) == expected(bench, rid)
    assert bench.loop.num_push_backs == 0


@pytest.mark.parametrize("how", ["ends", "is cancelled"])
def test_room_that_another_request_leaves_ends_the_wait(how: str):
    """Nothing outside tells the loop of it."""
    outside = Outside()
    bench = outside.bench
    bench.start("slow", 3, 4)
    bench.start("a", 3, 4)
    outside.answers["admit"] = AdmitOutcome(ready=False, reason=NAMED)
    outside.whose = {"slow"}
    bench.tick()
    if how == "is cancelled":
        bench.loop.cancel("a")
    while how == "ends" and "a" not in bench.ledger.ended:
        bench.tick()
    outside.answers.clear()
    assert bench.loop.busy
    bench.finish()
    assert bench.output("slow") == expected(bench, "slow")


def test_item_8_5_8_a_held_request_keeps_its_memory_and_its_place():
    outside = Outside(num_pages=4, page_size=2, running=2)
    bench = outside.bench
    bench.start("slow", 4, 2)
    bench.tick()
    outside.answers["admit"] = AdmitOutcome(ready=False, reason=NAMED)
    outside.whose = {"slow"}
    bench.start("a", 2, 2)
    bench.start("b", 2, 2)
    outside.rest()
    assert bench.ledger.order == ["a", "b"]
    assert bench.cache.stored_len("slow") == 4
    outside.come()
    bench.finish()
    assert bench.output("slow") == expected(bench, "slow")


def test_being_woken_for_nothing_asks_once_more_and_waits_again():
    outside = Outside()
    outside.bench.start("slow", 3, 2)
    outside.answers["admit"] = AdmitOutcome(ready=False)
    for count in (1, 2, 3):
        outside.rest()
        assert len(outside.asked) == count
        assert not outside.bench.loop.busy
        outside.bench.engine.waker.wake()
    outside.come()
    outside.bench.finish()


@pytest.mark.parametrize("stage", ["admit", "retrieve"])
def test_a_held_request_can_be_cancelled(stage):
    outside = Outside()
    outside.answers[stage] = AdmitOutcome(ready=False)
    outside.bench.start("slow", 3, 2, published={"probe": "something"})
    outside.rest()
    outside.bench.loop.cancel("slow")
    outside.bench.finish()
    assert outside.bench.ledger.ended["slow"].cancelled


def test_item_8_5_7_a_request_whose_state_is_on_its_way_here_is_held_until_it_has_landed():
    outside = Outside()
    bench = outside.bench
    outside.answers["retrieve"] = AdmitOutcome(ready=False)
    bench.start("slow", 3, 2, published={"probe": "pages of slow"})
    bench.start("a", 3, 2)
    outside.rest()
    assert bench.ledger.order == ["a"]
    assert "slow" not in bench.ledger.scheduled, "its first step has not begun"
    asked = [verb for verb, rids in outside.asked if rids == ("slow",)]
    assert asked == ["retrieve"] * 2, "asked once, and again when a has ended"
    outside.come()
    bench.finish()
    assert bench.output("slow") == expected(bench, "slow")
    asked = [verb for verb, rids in outside.asked if rids == ("slow",)]
    assert asked[:4] == [*["retrieve"] * 3, "admit"]


@pytest.mark.parametrize("name", [None, "bad"])
def test_defect_8_6_5_a_terminal_answer_to_an_import_ends_the_request(name):
    outside = Outside()
    bench = outside.bench
    reason = AdmitRuntimeError("of another size", name)
    outside.answers["retrieve"] = AdmitOutcome(ok=False, reason=reason)
    bench.start("bad", 3, 2, published={"probe": "pages"})
    bench.start("a", 3, 2)
    bench.finish(max_ticks=9)
    assert isinstance(bench.error("bad"), RequestFailedError)
    assert "could not be brought in: of another size" in str(bench.error("bad"))
    assert bench.output("a") == expected(bench, "a")


def test_defect_8_6_5_a_terminal_answer_that_comes_later_ends_the_request_too():
    outside = Outside()
    bench = outside.bench
    outside.answers["retrieve"] = AdmitOutcome(ready=False)
    bench.start("bad", 3, 2, published={"probe": "pages"})
    outside.rest()
    outside.answers["retrieve"] = AdmitOutcome(ok=False, reason=AdmitRuntimeError("gone"))
    bench.engine.waker.wake()
    bench.finish()
    assert "gone" in str(bench.error("bad"))


@pytest.mark.parametrize(
    "reason", [AllocationFailed("no pages", 1, "slow"), RequestOffloading("not yet", "slow")]
)
def test_defect_8_6_14_an_import_without_room_waits_for_others_and_alone_is_computed_here(reason):
    outside = Outside()
    bench = outside.bench
    outside.answers["retrieve"] = AdmitOutcome(ok=False, reason=reason)
    bench.start("a", 3, 5)
    bench.tick()
    outside.whose = {"slow"}
    bench.start("slow", 3, 2, published={"probe": "pages"})
    bench.start("later", 1, 1)
    while "a" not in bench.ledger.ended:
        bench.tick()
    assert bench.ledger.scheduled == {"a"}, "nobody overtakes the one that has no room"
    bench.finish(max_ticks=30)
    assert bench.states["slow"].num_push_backs == 1
    for rid in bench.states:
        assert bench.output(rid) == expected(bench, rid)


def test_defect_8_6_14_an_import_without_room_moves_away_who_is_held():
    """The held one runs no step, so that it would never give its pages back by itself."""
    outside = Outside(num_pages=4, page_size=2, host_pages=4)
    bench = outside.bench
    bench.start("slow", 6, 2)
    bench.tick()
    outside.answers["admit"] = AdmitOutcome(ready=False, reason=NAMED)
    outside.whose = {"slow"}
    bench.start("a", 5, 3)
    outside.rest()
    assert bench.output("a") == expected(bench, "a")
    assert (bench.loop.num_offloads, bench.loop.num_push_backs) == (1, 0)
    outside.come()
    bench.finish()
    assert bench.output("slow") == expected(bench, "slow")


def test_item_8_5_7_a_step_on_offloading_state_that_is_not_offloaded_is_held():
    outside = Outside()
    bench = outside.bench
    outside.answers["admit"] = AdmitOutcome(ok=False, reason=RequestOffloading("busy", "slow"))
    outside.whose = {"slow"}
    bench.start("slow", 3, 2)
    bench.start("a", 3, 2)
    outside.rest()
    assert bench.ledger.order == ["a"]
    outside.come()
    bench.finish()
    assert bench.output("slow") == expected(bench, "slow")


def test_whoever_sleeps_is_called_when_the_engine_is_woken():
    outside = Outside()
    calls = []
    outside.bench.engine.waker.wake()
    outside.bench.engine.waker.bind(lambda: calls.append("woken"))
    assert calls == ["woken"], "also for what came before"
    assert outside.bench.engine.waker.take()
    assert not outside.bench.engine.waker.take()
    outside.bench.engine.waker.wake()
    assert calls == ["woken", "woken"]
    assert not outside.bench.loop.busy, "there is nobody to wake"


def test_a_new_request_ends_the_wait_of_a_loop_whose_requests_are_all_held():
    outside = Outside()
    bench = outside.bench
    outside.answers["admit"] = AdmitOutcome(ready=False, reason=NAMED)
    outside.whose = {"slow"}
    bench.start("slow", 3, 2)
    outside.rest()
    bench.start("a", 3, 2)
    assert bench.loop.busy
    outside.rest()
    assert bench.output("a") == expected(bench, "a")
    bench.loop.push_back_all()
    assert bench.cache.used_tokens == 0
    outside.come()
    bench.finish()
    assert bench.output("slow") == expected(bench, "slow")
