"""A loop that looks ahead on a device with nothing beside the host: all happens on its own thread."""

from __future__ import annotations

import threading

from phalanx.device.cpu import CpuBackend
from phalanx.loop.driving import create_driver
from phalanx.loop.driving.in_turn import StepsInTurn
from phalanx.loop.driving.threads import StepThreads
from phalanx.loop.pipelined_loop import PipelinedLoop
from phalanx.testing.probe_resource import ProbeSpec
from phalanx.testing.step_models import CacheReader, cache_reader_engine
from phalanx.testing.token_request import NODE, TokenRequest
from tests.loop.ledger import Bench, bench_of, prompt_of
from tests.loop.surprising import StoppingRequest, WanderingRequest, check_outputs
from tests.loop.threaded import ThreadedLoop
from tests.step.caches import in_flight


class Logged(CacheReader):
    """Notes what happens, and that it happens on the thread that made it."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log
        self.thread = threading.get_ident()

    def forward(self, prepared):
        assert threading.get_ident() == self.thread
        self.log.append("forward")
        return super().forward(prepared)

    def check_stop(self, row, outputs):
        self.log.append("look")
        return super().check_stop(row, outputs)


def logged_bench() -> tuple[Bench, list[str]]:
    log: list[str] = []

    def react(verb, rids):
        if verb in ("plan", "begin", "commit"):
            log.append(verb)

    probe = ProbeSpec("probe", frozenset({NODE}), react=react)
    return bench_of(node=Logged(log), probe=probe, kind=PipelinedLoop), log


def test_a_step_is_planned_ahead_and_what_came_before_is_handed_out_before_it_runs():
    before = threading.active_count()
    bench, log = logged_bench()
    bench.start("a", 3, 4)
    ticks = []
    while bench.loop.busy:
        log.clear()
        bench.tick()
        ticks.append([*log])
    runs = ["begin", "forward", "commit"]
    assert ticks == [["plan", *runs, "plan", "look"]] + [[*runs, "plan", "look"]] * 2 + [
        [*runs, "look"]
    ]
    check_outputs(bench)
    assert bench.loop.num_ahead == 3
    assert threading.active_count() == before, "no thread was started"
    bench.loop.close()


def counts(loop, kind, num_requests):
    bench = bench_of(kind=loop)
    for index in range(num_requests):
        bench.start(f"r{index}", 3 + index, 12, kind=kind)
    bench.finish()
    check_outputs(bench)
    bench.loop.close()
    num_forwards = bench.engine._nodes[NODE].submodule.num_forwards
    pushed_back = bench.loop.num_push_backs
    return num_forwards, bench.loop.num_ahead, bench.loop.num_discarded, pushed_back


def test_it_computes_ahead_what_threads_do():
    assert counts(PipelinedLoop, TokenRequest, 4) == counts(ThreadedLoop, TokenRequest, 4)


def test_a_step_that_turns_out_to_be_for_nobody_is_not_computed():
    num_forwards, num_ahead, discarded, _ = counts(PipelinedLoop, StoppingRequest, 1)
    assert discarded == 0
    threaded = counts(ThreadedLoop, StoppingRequest, 1)
    assert threaded == (num_forwards + 1, num_ahead + 1, 1, 0)


def test_a_step_that_somebody_does_not_want_any_more_costs_no_state():
    assert counts(PipelinedLoop, WanderingRequest, 2)[2:] == (0, 0)
    assert min(counts(ThreadedLoop, WanderingRequest, 2)[2:]) > 0


def test_what_the_step_in_hand_leaves_in_the_cache_is_taken_over_as_with_threads():
    def taken_over(kind):
        bench = bench_of(kind=kind, tokens=5)
        prompt = prompt_of(23)
        bench.start("a", 0, 2, prompt=prompt)
        bench.tick()
        bench.start("b", 0, 2, prompt=prompt)
        bench.finish()
        check_outputs(bench)
        bench.loop.close()
        return bench.states["b"].num_adopted

    assert taken_over(PipelinedLoop) == taken_over(ThreadedLoop) > 0


def test_a_close_before_the_planned_step_has_run_gives_back_what_it_holds():
    bench = bench_of(kind=PipelinedLoop)
    bench.start("a", 3, 6)
    for _ in range(2):
        bench.tick()
    num_forwards = bench.engine._nodes[NODE].submodule.num_forwards
    assert in_flight(bench.cache) == [("a", "main")]
    bench.loop.close()
    bench.loop.close()
    assert in_flight(bench.cache) == []
    assert bench.engine._nodes[NODE].submodule.num_forwards == num_forwards
    bench.loop.cancel_all()
    assert bench.engine.at_rest()


def test_the_driver_is_the_one_that_suits_the_device():
    class Beside(CpuBackend):
        asynchronous = True

    for backend, kind in ((CpuBackend(), StepsInTurn), (Beside(), StepThreads)):
        driver = create_driver(cache_reader_engine(8, 4, backend=backend))
        assert isinstance(driver, kind)
        driver.close()
