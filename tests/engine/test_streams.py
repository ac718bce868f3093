from __future__ import annotations

import gc

import pytest

from phalanx import RequestFailedError
from phalanx.engine.sinks import UnreadEvents
from phalanx.errors import StreamStalledError
from phalanx.plugin import Delta, Failed
from phalanx.schema.control import Pause
from phalanx.testing import CountDelta, CountOutput, CountRequest, Fault


def test_deltas_come_as_they_are_made_and_the_output_is_last(gated, gate):
    with gated.stream(CountRequest(count=3), rid="mine") as stream:
        assert (stream.rid, stream.queue_time_s) == ("mine", None)
        for n in range(2):
            gate.let_pass()
            assert next(stream) == CountDelta((n,))
        gate.open()
        assert list(stream)[-1] == CountOutput((0, 1, 2))
        assert stream.queue_time_s == 0.0
        with pytest.raises(StopIteration):
            next(stream)


def test_unread_deltas_merge_when_the_reader_takes_them(counting):
    stream = counting.stream(CountRequest(count=50))
    counting.submit(CountRequest(count=60)).result()
    assert list(stream) == [CountDelta(tuple(range(50))), CountOutput(tuple(range(50)))]


def test_a_failed_request_raises_after_its_deltas(counting):
    with pytest.raises(RequestFailedError, match="fails as it was told to"):
        list(counting.stream(CountRequest(count=3, fault=Fault.FAIL)))


def test_cancel_ends_a_stream_with_what_it_has(gated, gate):
    stream = gated.stream(CountRequest(count=1000), rid="long")
    gate.let_pass()
    assert next(stream) == CountDelta((0,))
    gated.cancel("long")
    gate.open()
    *_, output = stream
    assert isinstance(output, CountOutput)
    assert len(output.numbers) < 1000


@pytest.mark.parametrize("how", ["close", "drop", "leave"])
def test_a_stream_that_ends_early_cancels_its_request(gated, gate, how):
    stream = gated.stream(CountRequest(count=1000), rid="long")
    gate.let_pass()
    next(stream)
    if how == "close":
        stream.close()
        assert list(stream) == []
    elif how == "leave":
        with stream:
            pass
    del stream
    gc.collect()
    gate.open()
    assert gated.control(Pause())
    statistics = gated.statistics()
    assert (statistics.num_cancelled, statistics.num_in_flight) == (1, 0)
    assert statistics.loop.num_generated_tokens < 1000


def test_a_finished_stream_cancels_nothing_when_dropped(gated, gate):
    stream = gated.stream(CountRequest(count=1), rid="same")
    live = gated._requests.find("same")
    gate.let_pass()
    assert list(stream)
    assert not live.cancelled
    again = gated.submit(CountRequest(count=3), rid="same")
    stream.close()
    del stream
    gate.open()
    assert again.result() == CountOutput((0, 1, 2))


def test_a_reader_that_takes_nothing_is_cut_off(build, gate, clock):
    engine = build(before_tick=gate, stall_timeout_s=5.0)
    stalled = engine.stream(CountRequest(count=1000), rid="stalled")
    gate.await_tick()
    gate.let_pass()
    gate.await_tick()  # the first delta waits since now
    clock.advance(5.0)
    gate.let_pass()
    gate.await_tick()  # at the time-out it is still served
    assert not engine._requests.find("stalled").cancelled
    clock.advance(0.1)
    gate.let_pass()
    gate.await_tick()
    gate.open()
    assert next(stalled) == CountDelta((0, 1))
    with pytest.raises(StreamStalledError, match=r"waiting for 5.1 s.*stall_timeout_s=5"):
        next(stalled)
    assert list(stalled) == []
    assert engine.control(Pause())
    assert engine.statistics().num_cancelled == 1


def test_a_slow_reader_that_reads_is_served(build, gate, clock):
    engine = build(before_tick=gate, stall_timeout_s=5.0)
    stream = engine.stream(CountRequest(count=4))
    for n in range(4):
        gate.let_pass()
        assert next(stream) == CountDelta((n,))
        clock.advance(60.0)
    assert next(stream) == CountOutput((0, 1, 2, 3))


def test_the_loop_never_waits_for_a_reader(counting):
    unread = [counting.stream(CountRequest(count=100)) for _ in range(4)]
    assert counting.step(CountRequest(count=500)) == CountOutput(tuple(range(500)))
    assert all(len(list(stream)) == 2 for stream in unread)


def test_what_comes_after_the_end_is_dropped(clock):
    unread = UnreadEvents(clock)
    unread.append(Failed("r", ValueError("ended")), 0.0)
    unread.append(Delta("r", CountDelta((1,))), 0.0)
    assert isinstance(unread.take(), Failed)
    assert unread.take() is None


def test_deltas_that_cannot_be_joined_stay_apart(clock):
    class Word(str):
        def merged(self, later):
            return None

    unread = UnreadEvents(clock)
    payloads = ["plain", "text", CountDelta((1,)), CountDelta((2,)), Word("a"), Word("b")]
    for payload in payloads:
        unread.append(Delta("r", payload), 0.0)
    taken = [unread.take().payload for _ in range(5)]
    assert taken == ["plain", "text", CountDelta((1, 2)), "a", "b"]
    assert unread.take() is None
    assert unread.waiting_since_s is None
