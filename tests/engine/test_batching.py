from __future__ import annotations

import concurrent.futures
import threading

import pytest

from phalanx import Engine, InvalidRequestError, RequestFailedError
from phalanx.engine.sinks import FutureSink
from phalanx.errors import EngineOverloadedError
from phalanx.schema.control import Continue, Flush, Pause, PauseMode
from phalanx.testing import Counting, CountingArgs, CountOutput, CountRequest, Fault

from .conftest import executor_of


def numbers(count):
    return CountOutput(tuple(range(count)))


def test_step_returns_the_complete_output(counting):
    assert counting.step(CountRequest(count=3)) == numbers(3)
    assert counting.step(CountRequest(count=0)) == numbers(0)


def test_r46_submit_returns_a_standard_future(counting):
    futures = [counting.submit(CountRequest(count=n)) for n in range(20)]
    assert all(type(future) is concurrent.futures.Future for future in futures)
    done, _ = concurrent.futures.wait(futures)
    assert len(done) == 20
    assert [future.result() for future in futures] == [numbers(n) for n in range(20)]


def test_requests_share_ticks(gated, gate):
    first = gated.submit(CountRequest(count=5))
    gate.await_tick()
    others = [gated.submit(CountRequest(count=5)) for _ in range(3)]
    gate.open()
    concurrent.futures.wait([first, *others])
    statistics = gated.statistics()
    assert statistics.loop.num_steps == 6
    assert statistics.num_completed == 4


def test_one_thread_alone_calls_the_plugin(build):
    threads = set()
    engine = build(before_tick=lambda: threads.add(threading.current_thread()))
    for _ in range(3):
        engine.step(CountRequest(count=2))
    assert len(threads) == 1
    assert threading.current_thread() not in threads


def test_r47_a_queued_future_can_be_cancelled_and_never_starts(gated, gate):
    running = gated.submit(CountRequest(count=1))
    gate.await_tick()
    queued = gated.submit(CountRequest(count=1, fault=Fault.RAISE_IN_START))
    assert not running.cancel()
    assert queued.cancel()
    gate.open()
    assert running.result() == numbers(1)
    assert concurrent.futures.wait([queued]).done == {queued}
    assert gated.step(CountRequest(count=2)) == numbers(2)
    assert gated.statistics().num_cancelled == 1


def test_cancel_of_a_running_request_gives_what_it_has(gated, gate):
    future = gated.submit(CountRequest(count=100), rid="long")
    gate.await_tick()
    gate.let_pass()
    gate.await_tick()
    assert gated.cancel("long")
    gate.open()
    assert future.result() == numbers(2)
    assert not gated.cancel("long")
    assert not gated.cancel("unknown")


def test_cancel_in_the_same_moment_as_submit(gated, gate):
    blocker = gated.submit(CountRequest(count=1))
    gate.await_tick()
    future = gated.submit(CountRequest(count=100), rid="short")
    assert gated.cancel("short")
    gate.open()
    assert future.result() == numbers(0)
    assert blocker.result() == numbers(1)
    statistics = gated.statistics()
    assert (statistics.num_cancelled, statistics.num_completed) == (1, 1)


def test_a_late_cancel_spares_a_later_request_of_the_same_id(gated, gate):
    first = gated.submit(CountRequest(count=1), rid="same")
    gate.await_tick()
    live = gated._requests.find("same")
    gate.let_pass()
    assert first.result() == numbers(1)
    second = gated.submit(CountRequest(count=3), rid="same")
    executor_of(gated).cancel(live)
    gate.open()
    assert second.result() == numbers(3)


def test_r48_a_request_failure_is_its_own(counting):
    failing = counting.submit(CountRequest(count=3, fault=Fault.FAIL), rid="bad")
    beside = counting.submit(CountRequest(count=3))
    with pytest.raises(RequestFailedError, match="request 'bad' fails as it was told to") as caught:
        failing.result()
    assert type(caught.value.__cause__).__name__ == "CountingError"
    assert beside.result() == numbers(3)
    assert counting.step(CountRequest(count=1)) == numbers(1)
    assert counting.statistics().num_failed == 1


@pytest.mark.parametrize("call", ["step", "submit", "stream"])
def test_refused_requests_raise_before_they_are_queued(counting, call):
    with pytest.raises(InvalidRequestError, match="count=-1 must be from 0 to 1000") as caught:
        getattr(counting, call)(CountRequest(count=-1))
    assert caught.value.field == "count"
    with pytest.raises(InvalidRequestError, match="takes CountRequest, not str"):
        getattr(counting, call)("count to three")
    with pytest.raises(InvalidRequestError, match="rid '' must be a non-empty string"):
        getattr(counting, call)(CountRequest(count=1), rid="")
    statistics = counting.statistics()
    assert (statistics.num_refused, statistics.num_accepted) == (3, 0)


def test_a_live_id_cannot_be_used_twice(gated, gate):
    first = gated.submit(CountRequest(count=1), rid="same")
    with pytest.raises(InvalidRequestError, match="'same' belongs to a request") as caught:
        gated.submit(CountRequest(count=1), rid="same")
    assert caught.value.field == "rid"
    gate.open()
    first.result()
    assert gated.step(CountRequest(count=1), rid="same") == numbers(1)


def test_more_than_max_pending_requests_are_refused(build, gate):
    engine = build(before_tick=gate, max_pending_requests=2)
    accepted = [engine.submit(CountRequest(count=1)) for _ in range(2)]
    for call in (engine.submit, engine.step, engine.stream):
        with pytest.raises(EngineOverloadedError, match="max_pending_requests=2"):
            call(CountRequest(count=1))
    gate.open()
    concurrent.futures.wait(accepted)
    assert engine.step(CountRequest(count=1)) == numbers(1)
    assert engine.statistics().num_refused == 3


def test_statistics_do_not_wait_for_a_tick(gated, gate, clock):
    future = gated.submit(CountRequest(count=1))
    gate.await_tick()
    clock.advance(2.0)
    waiting = gated.statistics()
    assert (waiting.num_accepted, waiting.num_in_flight, waiting.loop.num_running) == (1, 1, 1)
    gate.open()
    future.result()
    assert gated.statistics().queue_time_s == 2.0
    assert gated.statistics().num_in_flight == 0


def test_execution_time_counts_from_the_first_step(gated, gate, clock):
    future = gated.submit(CountRequest(count=2))
    gate.await_tick()
    gate.let_pass()
    gate.await_tick()
    clock.advance(3.0)
    gate.open()
    future.result()
    statistics = gated.statistics()
    assert (statistics.queue_time_s, statistics.execution_time_s) == (0.0, 3.0)


def test_pause_holds_requests_until_continue(counting):
    assert counting.control(Pause(PauseMode.IN_PLACE))
    future = counting.submit(CountRequest(count=3))
    assert not counting.control(Flush())
    assert not future.done()
    assert counting.statistics().loop.paused
    assert counting.control(Continue())
    assert future.result() == numbers(3)
    assert counting.control(Flush())


def test_pause_abort_answers_when_the_aborted_have_ended(gated, gate):
    futures = [gated.submit(CountRequest(count=1000)) for _ in range(3)]
    gate.await_tick()
    paused = concurrent.futures.Future()
    thread = threading.Thread(target=lambda: paused.set_result(gated.control(Pause())))
    thread.start()
    gate.open()
    assert paused.result()
    # No wait: they ended before the answer.
    assert all(future.done() for future in futures)
    thread.join()
    late = gated.submit(CountRequest(count=1))
    assert not gated.control(Flush())
    assert not late.done()
    assert gated.control(Continue())
    assert late.result() == numbers(1)


@Engine.register
class AbortsSlowly(Counting):
    """Reports one cancelled request a tick."""

    name = "aborts_slowly"

    def tick(self):
        waiting = self._state.cancelled[1:]
        del self._state.cancelled[1:]
        events = super().tick()
        self._state.cancelled.extend(waiting)
        return events


def test_pause_abort_waits_as_many_ticks_as_it_takes(build, gate):
    engine = build("aborts_slowly", CountingArgs(before_tick=gate))
    futures = [engine.submit(CountRequest(count=1000)) for _ in range(4)]
    gate.await_tick()
    answer = executor_of(engine)._loop.control(Pause())
    for _ in range(4):
        gate.let_pass()
        gate.await_tick()
        assert not answer.done()
    gate.let_pass()
    assert answer.result()
    assert all(future.done() for future in futures)


def test_pause_abort_of_an_idle_engine(counting):
    assert counting.control(Pause())
    assert counting.control(Continue())


@Engine.register
class Uncontrolled(Counting):
    """Leaves `control` as the base class has it."""

    name = "uncontrolled"

    def control(self, op):
        return super(Counting, self).control(op)


def test_a_plugin_without_control_refuses_and_serves_on(build):
    engine = build("uncontrolled")
    with pytest.raises(InvalidRequestError, match="'uncontrolled' has no control operations"):
        engine.control(Flush())
    assert engine.step(CountRequest(count=1)) == numbers(1)


@pytest.mark.parametrize("call", ["step", "control"])
def test_waiting_calls_are_refused_on_the_loop_thread(gated, gate, call):
    refused = concurrent.futures.Future()

    def callback(_):
        try:
            getattr(gated, call)(CountRequest(count=1) if call == "step" else Flush())
        except InvalidRequestError as error:
            refused.set_result(str(error))

    future = gated.submit(CountRequest(count=1))
    future.add_done_callback(callback)
    gate.open()
    assert "call it from another thread" in refused.result()
    assert gated.step(CountRequest(count=1)) == numbers(1)


def test_properties(counting):
    assert counting.plugin is Counting
    assert isinstance(counting.entry, Counting)
    assert counting.limits.context_length == 1000
    assert counting.config.device.target == "cpu"
    assert counting.args.plugin == "counting"
    assert counting.version == "default"
    assert not counting.closed


def test_an_interrupted_step_cancels_its_request(gated, gate, interrupt_when):
    interrupt_when(gate.await_tick)
    with pytest.raises(KeyboardInterrupt):
        gated.step(CountRequest(count=1000))
    gate.open()
    assert gated.step(CountRequest(count=3)) == numbers(3)
    assert gated.statistics().num_cancelled == 1


@pytest.mark.parametrize("rid", ["", "r\ud800", 7])
def test_an_id_that_cannot_name_a_request_is_refused(counting, rid):
    with pytest.raises(InvalidRequestError) as caught:
        counting.submit(CountRequest(count=1), rid=rid)
    assert caught.value.field == "rid"
    assert counting.step(CountRequest(count=1)) == numbers(1)


def test_a_cancel_that_overtakes_its_request_still_ends_it(counting):
    sink = FutureSink()
    live = counting._requests.accept("late", sink)
    executor_of(counting).cancel(live)
    executor_of(counting).submit(live, CountRequest(count=10**9))
    assert len(sink.future.result().numbers) < 10**9
    assert counting.statistics().num_cancelled == 1
