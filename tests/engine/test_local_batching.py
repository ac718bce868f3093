"""Replicas of a batching plugin in worker processes: real spawned ones, which all tests share."""

from __future__ import annotations

import gc
from concurrent.futures import Future

import pytest

from phalanx.engine.dispatcher import RequestDispatcher
from phalanx.engine.executors.multiprocess import MultiprocessExecutor
from phalanx.errors import EngineAsleepError, InvalidRequestError
from phalanx.schema.control import (
    CheckWeights,
    Continue,
    Flush,
    MemoryTag,
    Pause,
    Sleep,
    Wake,
    WeightCheck,
)
from phalanx.testing import CountDelta, CountingArgs, CountOutput, CountRequest

from .local_plugins import HookedCount
from .test_local import build, local


@pytest.fixture(scope="module")
def counters():
    """Two replicas of a batching plugin."""
    with build("counting", CountingArgs(max_batch_size=2), local(2)) as engine:
        yield engine


def test_r88_a_batching_plugin_gains_replicas_without_a_change(counters):
    futures = [counters.submit(CountRequest(count=count)) for count in range(8)]
    assert [len(future.result().numbers) for future in futures] == list(range(8))
    *deltas, last = counters.stream(CountRequest(count=5))
    assert last == CountOutput((0, 1, 2, 3, 4))
    assert all(isinstance(delta, CountDelta) for delta in deltas)
    assert sum((delta.numbers for delta in deltas), ()) == last.numbers


def test_r2_r77_r78_r86_a_local_engine_is_a_dispatcher_over_one_executor_a_replica(counters):
    dispatcher = counters._startup.current
    assert isinstance(dispatcher, RequestDispatcher)
    assert [type(each) for each in dispatcher._replicas] == [MultiprocessExecutor] * 2
    before = counters.statistics().replicas
    # R77, R78, R86: each replica batches its own requests, at most max_batch_size at once.
    futures = [counters.submit(CountRequest(count=50)) for _ in range(8)]
    for future in futures:
        future.result()
    for old, new in zip(before, counters.statistics().replicas, strict=True):
        assert new.num_completed - old.num_completed == 4
        assert new.loop.last_batch_size <= 2
        # 4 x 50, two at a time.
        assert new.loop.num_steps - (old.loop.num_steps if old.loop else 0) >= 100


def test_i81_replicas_in_workers_sleep_and_wake_by_tags(counters):
    assert counters.control(Sleep())
    with pytest.raises(EngineAsleepError):
        counters.submit(CountRequest(count=1))
    weights = frozenset({MemoryTag.WEIGHTS})
    assert counters.control(Wake(weights))
    assert counters.memory.resident == weights
    with pytest.raises(InvalidRequestError, match="counting"):
        counters.ask(CheckWeights(WeightCheck.CHECKSUM))
    assert counters.control(Wake())
    futures = [counters.submit(CountRequest(count=2)) for _ in range(4)]
    assert [future.result() for future in futures] == [CountOutput((0, 1))] * 4
    assert counters.memory.rss_bytes > 2 << 20


def test_control_reaches_every_replica_and_statistics_follow(counters):
    assert counters.control(Pause()) is True
    assert [replica.loop.paused for replica in counters.statistics().replicas] == [True, True]
    waiting = [counters.submit(CountRequest(count=2)) for _ in range(2)]
    assert counters.control(Flush()) is False
    assert counters.control(Continue()) is True
    assert [future.result().numbers for future in waiting] == [(0, 1)] * 2


def test_a_cancelled_request_ends_with_what_it_has(counters):
    counters.control(Pause())
    future = counters.submit(CountRequest(count=900), rid="long")
    assert counters.cancel("long") is True
    counters.control(Continue())
    assert len(future.result().numbers) < 900
    assert counters.cancel("long") is False


def test_a_dropped_stream_cancels_its_request(counters):
    before = counters.statistics().num_cancelled
    stream = counters.stream(CountRequest(count=1000))
    next(stream)
    del stream
    gc.collect()
    assert counters.control(Continue())
    # The cancel was sent before this request, to one of the two replicas each.
    for _ in range(2):
        counters.step(CountRequest(count=1))
    while counters.statistics().num_in_flight:
        counters.step(CountRequest(count=1))
    assert counters.statistics().num_cancelled == before + 1


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize("call", ["step", "control"])
def test_waiting_in_a_callback_on_the_workers_thread_is_refused(counters, call):
    refused = Future()

    def callback(_):
        try:
            counters.step(CountRequest(count=1)) if call == "step" else counters.control(Continue())
        except InvalidRequestError as error:
            refused.set_result(error)

    assert counters.control(Pause())
    future = counters.submit(CountRequest(count=1))
    future.add_done_callback(callback)  # while it cannot have ended
    assert counters.control(Continue())
    assert "future's callback" in str(refused.result())
    assert counters.step(CountRequest(count=2)).numbers == (0, 1)
    assert counters.statistics().num_in_flight == 0


def test_a_cancel_that_comes_while_the_request_is_sent_is_kept(counters):
    counters.control(Pause())
    cancelled = []
    request = HookedCount(count=900, hook=lambda: cancelled.append(counters.cancel("early")))
    future = counters.submit(request, rid="early")
    counters.control(Continue())
    assert cancelled == [True]
    assert len(future.result().numbers) < 900


def test_an_interrupt_while_a_request_is_sent_leaves_nothing_in_flight(counters):
    before = counters.statistics()
    for call in (counters.submit, counters.step, counters.stream):
        with pytest.raises(KeyboardInterrupt):
            call(HookedCount(count=1, hook=interrupt))
    after = counters.statistics()
    assert (after.num_in_flight, after.num_accepted) == (0, before.num_accepted)
    assert [counters.step(CountRequest(count=1)).numbers for _ in range(2)] == [(0,)] * 2


@pytest.mark.long
def test_a_loop_s_counters_are_there_before_the_first_request():
    with build("counting", CountingArgs(), local(2)) as engine:
        assert [replica.loop is not None for replica in engine.statistics().replicas] == [True] * 2
