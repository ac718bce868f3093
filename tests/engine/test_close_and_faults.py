from __future__ import annotations

import concurrent.futures
import gc
import threading
import weakref

import pytest

from phalanx import Engine, EngineArgs, EngineUnavailableError
from phalanx.engine.executors.loop_thread import Close
from phalanx.errors import InvalidInputError
from phalanx.schema.control import Continue, Flush, Pause, PauseMode
from phalanx.testing import Counting, CountingArgs, CountingError, CountOutput, CountRequest, Fault

from .conftest import cpu_config, executor_of

FAULTS = [Fault.RAISE_IN_START, Fault.RAISE_IN_TICK, Fault.RAISE_IN_CANCEL]


def in_threads(call, count):
    """Outcomes of `call`, made from this many threads at once."""
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        barrier = threading.Barrier(count)

        def run():
            barrier.wait()
            return call()

        futures = [pool.submit(run) for _ in range(count)]
    return [future.exception() for future in futures]


@pytest.mark.parametrize("fault", FAULTS)
def test_r50_r51_a_plugin_that_raises_has_failed_for_all(gated, gate, fault):
    future = gated.submit(CountRequest(count=1000))
    gate.await_tick()
    stream = gated.stream(CountRequest(count=1000))
    bad = gated.submit(CountRequest(count=1000, fault=fault), rid="bad")
    queued = gated.submit(CountRequest(count=1000))
    if fault is Fault.RAISE_IN_CANCEL:
        gated.cancel("bad")
    gate.open()
    for end in (future.result, bad.result, queued.result, lambda: list(stream)):
        with pytest.raises(EngineUnavailableError, match="plugin 'counting' failed") as caught:
            end()
        assert isinstance(caught.value.__cause__, CountingError)
    late = gated.submit(CountRequest(count=1))
    assert isinstance(late.exception(), EngineUnavailableError)
    assert isinstance(late.exception().__cause__, CountingError)
    for call in (gated.step, gated.stream):
        with pytest.raises(EngineUnavailableError, match="create a new engine"):
            call(CountRequest(count=1))
    with pytest.raises(EngineUnavailableError, match="create a new engine"):
        gated.control(Flush())
    gated.close()
    assert gated.entry.num_closes == 1
    statistics = gated.statistics()
    assert (statistics.num_failed, statistics.num_in_flight) == (4, 0)


@Engine.register
class Unruly(Counting):
    """Raises out of `control`; its ticks return what is no event."""

    name = "unruly"

    def control(self, op):
        raise CountingError("control fails as it was told to")

    def tick(self):
        super().tick()
        return ["nonsense"]


def test_control_that_raises_has_failed_for_all(build):
    engine = build("unruly")
    with pytest.raises(EngineUnavailableError, match="control fails as it was told to"):
        engine.control(Flush())
    with pytest.raises(EngineUnavailableError):
        engine.step(CountRequest(count=1))


def test_what_is_no_event_is_a_failure_of_the_plugin(build):
    engine = build("unruly")
    with pytest.raises(EngineUnavailableError, match="plugin 'unruly' failed"):
        engine.step(CountRequest(count=1))


def test_a_failure_answers_a_pause_that_waits_for_its_aborts(build, gate):
    def tick():
        gate()
        if passes:
            raise CountingError("this tick fails")

    passes = []
    engine = build(before_tick=tick)
    future = engine.submit(CountRequest(count=1000))
    gate.await_tick()
    answer = executor_of(engine)._loop.control(Pause())
    behind = executor_of(engine)._loop.control(Continue())
    passes.append(1)
    gate.open()
    for waiting in (answer, behind, future):
        with pytest.raises(EngineUnavailableError, match="this tick fails"):
            waiting.result()


def test_r52_a_second_engine_works_after_the_first_failed(build):
    first = build()
    with pytest.raises(EngineUnavailableError):
        first.step(CountRequest(count=1, fault=Fault.RAISE_IN_TICK))
    second = build()
    assert second.step(CountRequest(count=2)) == CountOutput((0, 1))
    first.close()
    assert second.step(CountRequest(count=2)) == CountOutput((0, 1))


def test_close_ends_what_is_live(gated, gate):
    started = gated.submit(CountRequest(count=1000))
    gate.await_tick()
    stream = gated.stream(CountRequest(count=1000))
    queued = gated.submit(CountRequest(count=1000))
    control = executor_of(gated)._loop.control(Continue())
    executor_of(gated)._loop._inbox.put(Close())  # the loop will start both, and then leave
    gate.open()
    gated.close()
    with pytest.raises(EngineUnavailableError, match="closed"):
        started.result()
    with pytest.raises(EngineUnavailableError, match="closed"):
        list(stream)
    assert isinstance(queued.exception(), EngineUnavailableError)
    assert control.result()
    assert gated.entry.num_closes == 1
    assert gated.statistics().num_in_flight == 0


def test_r69_a_future_that_has_not_started_is_cancelled_by_close(gated, gate):
    started = gated.submit(CountRequest(count=1000))
    gate.await_tick()
    executor_of(gated)._loop._inbox.put(Close())  # what is submitted from here on stays queued
    queued = gated.submit(CountRequest(count=1000))
    stream = gated.stream(CountRequest(count=1000))
    late_control = executor_of(gated)._loop.control(Continue())
    gate.open()
    gated.close()
    assert isinstance(started.exception(), EngineUnavailableError)
    assert concurrent.futures.wait([queued]).done == {queued}
    assert queued.cancelled()
    with pytest.raises(EngineUnavailableError):
        list(stream)
    assert isinstance(late_control.exception(), EngineUnavailableError)


def test_r50_s11_a_closed_engine_refuses(counting):
    counting.close()
    assert counting.closed
    future = counting.submit(CountRequest(count=1))
    assert isinstance(future.exception(), EngineUnavailableError)
    for call in (counting.step, counting.stream):
        with pytest.raises(EngineUnavailableError, match="the engine is closed"):
            call(CountRequest(count=1))
    with pytest.raises(EngineUnavailableError, match="the engine is closed"):
        counting.control(Flush())
    assert not counting.cancel("any")
    assert counting.statistics().num_in_flight == 0


def test_r68_s13_close_again_and_from_several_threads(counting):
    counting.submit(CountRequest(count=1000))
    assert in_threads(counting.close, 5) == [None] * 5
    counting.close()
    assert counting.entry.num_closes == 1


def test_r73_a_with_statement_closes(build):
    with build() as engine:
        entry = engine.entry
        engine.step(CountRequest(count=1))
    assert engine.closed
    assert entry.num_closes == 1


def test_close_on_the_loop_thread_does_not_deadlock(gated, gate):
    future = gated.submit(CountRequest(count=1))
    other = gated.submit(CountRequest(count=1000))
    closed = threading.Event()
    future.add_done_callback(lambda _: (gated.close(), closed.set()))
    gate.open()
    closed.wait()
    with pytest.raises(EngineUnavailableError, match="closed"):
        other.result()
    gated.close()
    assert gated.entry.num_closes == 1


def test_what_closing_the_plugin_raises_is_raised_once(build):
    engine = build(plugin_args=CountingArgs(fail_close=True))
    future = engine.submit(CountRequest(count=1000))
    with pytest.raises(CountingError, match="close fails as it was told to"):
        engine.close()
    engine.close()
    assert future.done()


def test_a_failed_setup_raises_its_own_error_and_leaves_no_thread(build):
    before = set(threading.enumerate())
    with pytest.raises(CountingError, match="setup fails as it was told to"):
        build(plugin_args=CountingArgs(fail_setup=True))
    assert {thread for thread in threading.enumerate() if thread.is_alive()} <= before


def test_r8_closing_leaves_no_thread(build):
    before = set(threading.enumerate())
    with build() as engine:
        engine.step(CountRequest(count=1))
        assert len(set(threading.enumerate()) - before) == 1
    assert set(threading.enumerate()) <= before


def test_a_closed_engine_can_be_collected():
    engine = Engine(EngineArgs("counting", CountingArgs(), cpu_config()))
    engine.step(CountRequest(count=1))
    engine.close()
    entry = weakref.ref(engine.entry)
    del engine
    gc.collect()
    assert entry() is None


def test_r5_r35_arguments_are_checked_before_anything_is_loaded(counting):
    assert counting.mode == "inline"
    with pytest.raises(InvalidInputError, match="must be phalanx.EngineArgs"):
        Engine("counting")
    with pytest.raises(InvalidInputError, match="takes plugin_args of type CountingArgs"):
        Engine(EngineArgs("counting", object()))
    with pytest.raises(InvalidInputError, match="must be phalanx.EngineConfig or None"):
        Engine(EngineArgs("counting", CountingArgs(fail_setup=True), "cpu"))


def test_pause_modes_reach_the_plugin(counting):
    for mode in PauseMode:
        assert counting.control(Pause(mode))
        assert counting.statistics().loop.paused
        assert counting.control(Continue())
