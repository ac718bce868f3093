"""Requests that their node leaves out of a step: they wait until they are woken, and nothing spins."""

from __future__ import annotations

import pytest

from phalanx.loop.pipelined_loop import PipelinedLoop
from phalanx.loop.step_loop import StepLoop
from phalanx.testing.token_request import TokenRequest
from tests.loop.ledger import Bench, bench_of, expected
from tests.loop.threaded import ThreadedLoop

LOOPS = pytest.mark.parametrize("kind", [StepLoop, PipelinedLoop, ThreadedLoop])


class Hesitant(TokenRequest):
    """Its node leaves it out, and is asked `num_asked` times, until it is `ready`."""

    ready = False
    num_asked = 0

    def skip(self):
        self.num_asked += 1
        return not self.ready


def rest(bench: Bench) -> int:
    """Tick for as long as there is something to do; the number of ticks."""
    for num_ticks in range(60):
        if not bench.loop.busy:
            return num_ticks
        bench.tick()
    raise AssertionError("a hot loop")


@LOOPS
def test_a_request_that_is_left_out_is_not_asked_again_until_it_is_woken(kind):
    bench = bench_of(kind=kind)
    bench.start("late", 3, 4, kind=Hesitant)
    late = bench.states["late"]
    for num_asked in (1, 2, 3):
        assert bench.loop.busy
        assert rest(bench) <= 2
        assert late.num_asked == num_asked
        assert not bench.loop.idle
        assert bench.loop.num_steps == 0, "nothing was computed"
        bench.engine.waker.wake()
    late.ready = True
    bench.finish()
    assert bench.output("late") == expected(bench, "late")
    bench.loop.close()


@LOOPS
def test_others_go_on_beside_one_that_is_left_out_and_it_is_asked_when_they_leave(kind):
    bench = bench_of(kind=kind)
    bench.start("late", 3, 4, kind=Hesitant)
    bench.start("a", 3, 6)
    rest(bench)
    assert bench.output("a") == expected(bench, "a")
    late = bench.states["late"]
    assert late.num_asked == 2, "once at first, and when the other had left"
    assert "late" in bench.ledger.live
    late.ready = True
    bench.engine.waker.wake()
    bench.finish()
    assert bench.output("late") == expected(bench, "late")
    bench.loop.close()


@LOOPS
def test_a_request_that_is_left_out_can_be_cancelled(kind):
    bench = bench_of(kind=kind)
    bench.start("late", 3, 4, kind=Hesitant)
    rest(bench)
    bench.loop.cancel("late")
    bench.finish()
    assert bench.ledger.ended["late"].cancelled
    bench.loop.close()


@LOOPS
def test_a_wake_while_the_node_is_asked_is_not_lost(kind):
    """It comes after the loop has looked for one, and before it has taken the answer."""
    bench = bench_of(kind=kind)

    class WokenMeanwhile(Hesitant):
        def skip(self):
            left_out = super().skip()
            self.ready = True
            bench.engine.waker.wake()
            return left_out

    bench.start("late", 3, 4, kind=WokenMeanwhile)
    bench.finish()
    assert bench.output("late") == expected(bench, "late")
    bench.loop.close()


class LeftOutAhead(TokenRequest):
    """Its node leaves it out of every step that is prepared ahead, and of no other."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.ahead = False
        self.num_left_out = 0

    def take(self, span, ahead=0):
        self.ahead = ahead > 0
        return super().take(span, ahead)

    def skip(self):
        self.num_left_out += self.ahead
        return self.ahead


def test_a_row_left_out_of_a_step_ahead_comes_into_the_next_without_being_woken():
    bench = bench_of(kind=ThreadedLoop)
    bench.start("a", 3, 5, kind=LeftOutAhead)
    bench.start("b", 4, 7)
    bench.finish()
    for rid in "ab":
        assert bench.output(rid) == expected(bench, rid)
    assert bench.states["a"].num_left_out > 0
    bench.loop.close()


@LOOPS
def test_one_that_is_woken_comes_in_while_others_go_on(kind):
    bench = bench_of(kind=kind)
    bench.start("late", 3, 2, kind=Hesitant)
    bench.start("a", 3, 40)
    for _ in range(4):
        bench.tick()
    bench.states["late"].ready = True
    bench.engine.waker.wake()
    bench.finish()
    assert bench.ledger.order == ["late", "a"]
    bench.loop.close()


@LOOPS
def test_one_that_comes_while_others_go_on_is_asked_once_too(kind):
    bench = bench_of(kind=kind)
    bench.start("a", 3, 12)
    for _ in range(3):
        bench.tick()
    bench.start("late", 3, 2, kind=Hesitant)
    rest(bench)
    late = bench.states["late"]
    assert late.num_asked == 2, "once beside the other, and when that had left"
    late.ready = True
    bench.engine.waker.wake()
    bench.finish()
    assert bench.output("late") == expected(bench, "late")
    bench.loop.close()
