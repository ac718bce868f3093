from __future__ import annotations

import concurrent.futures
import threading

import pytest

from phalanx import EngineUnavailableError, InvalidRequestError, RequestFailedError
from phalanx.errors import EngineOverloadedError
from phalanx.schema.control import Flush
from phalanx.testing import EchoRequest

from .conftest import executor_of


class Block:
    """A step that has begun and waits for the test."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.release = threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        self.release.wait()


def in_thread(call, *args, **kwargs):
    """A future of `call`, run in a thread of its own."""
    future = concurrent.futures.Future()

    def run():
        try:
            future.set_result(call(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run).start()
    return future


@pytest.fixture
def block():
    block = Block()
    yield block
    block.release.set()


def until_live(engine, rid):
    """Wait until another thread's request is accepted and queued."""
    with executor_of(engine)._changed:
        executor_of(engine)._changed.wait_for(
            lambda: any(turn.live.rid == rid for turn in executor_of(engine)._queue)
        )


def test_step_runs_in_the_callers_thread_and_starts_none(echo):
    before = set(threading.enumerate())
    output = echo.step(EchoRequest("hello"))
    assert (output.text, output.thread) == ("hello", threading.current_thread())
    assert set(threading.enumerate()) == before


def test_submit_starts_one_worker_lazily(echo):
    before = set(threading.enumerate())
    outputs = [echo.submit(EchoRequest(str(n))) for n in range(5)]
    threads = {future.result().thread for future in outputs}
    assert len(threads) == 1
    assert set(threading.enumerate()) - before == threads


def test_step_and_submit_share_one_queue_in_order(echo, block):
    order = []
    first = echo.submit(EchoRequest("first", before=block))
    block.entered.wait()
    submitted = echo.submit(EchoRequest("second", before=lambda: order.append("second")))
    stepped = in_thread(
        echo.step, EchoRequest("third", before=lambda: order.append("third")), rid="third"
    )
    until_live(echo, "third")
    last = echo.submit(EchoRequest("fourth", before=lambda: order.append("fourth")))
    block.release.set()
    assert first.result().text == "first"
    concurrent.futures.wait([submitted, stepped, last])
    assert order == ["second", "third", "fourth"]
    assert stepped.result().thread is not last.result().thread


@pytest.mark.parametrize("call", ["step", "submit", "stream"])
def test_r48_what_the_plugin_raises_reaches_the_caller_unchanged(echo, call):
    class Own(Exception):
        pass

    error = Own("mine")

    def fail():
        raise error

    request = EchoRequest("x", before=fail)
    with pytest.raises(Own) as caught:
        if call == "step":
            echo.step(request)
        elif call == "submit":
            echo.submit(request).result()
        else:
            next(echo.stream(request))
    assert caught.value is error
    assert echo.step(EchoRequest("next")).text == "next"
    statistics = echo.statistics()
    assert (statistics.num_failed, statistics.num_completed) == (1, 1)


def test_a_plugin_that_exits_does_not_take_the_worker_along(echo):
    def leave():
        raise SystemExit(3)

    with pytest.raises(RequestFailedError, match=r"SystemExit\(3\)"):
        echo.submit(EchoRequest("x", before=leave)).result()
    with pytest.raises(SystemExit):
        echo.step(EchoRequest("x", before=leave))
    assert echo.submit(EchoRequest("next")).result().text == "next"


def test_r47_only_queued_futures_can_be_cancelled(echo, block):
    running = echo.submit(EchoRequest("running", before=block))
    block.entered.wait()
    started = []
    queued = echo.submit(EchoRequest("queued", before=lambda: started.append(1)))
    assert not running.cancel()
    assert queued.cancel()
    block.release.set()
    assert running.result().text == "running"
    assert echo.step(EchoRequest("next")).text == "next"
    assert queued.cancelled()
    assert not started
    assert echo.statistics().num_cancelled == 1


def test_cancel_by_id_reaches_queued_requests_only(echo, block):
    running = echo.submit(EchoRequest("running", before=block), rid="running")
    block.entered.wait()
    future = echo.submit(EchoRequest("a"), rid="future")
    stepped = in_thread(echo.step, EchoRequest("b"), rid="step")
    until_live(echo, "step")
    stream = echo.stream(EchoRequest("c"), rid="stream")
    assert not echo.cancel("running")
    assert all([echo.cancel("future"), echo.cancel("step"), echo.cancel("stream")])
    assert not echo.cancel("unknown")
    block.release.set()
    assert running.result().text == "running"
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()
    with pytest.raises(RequestFailedError, match="cancelled before it started"):
        stepped.result()
    with pytest.raises(RequestFailedError, match="cancelled before it started"):
        next(stream)
    assert echo.statistics().num_cancelled == 3


def test_a_dropped_queued_stream_never_starts(echo, block):
    running = echo.submit(EchoRequest("running", before=block))
    block.entered.wait()
    started = []
    stream = echo.stream(EchoRequest("dropped", before=lambda: started.append(1)))
    del stream
    block.release.set()
    running.result()
    echo.submit(EchoRequest("next")).result()
    assert not started


def test_stream_yields_the_output_alone(echo):
    with echo.stream(EchoRequest("only"), rid="mine") as stream:
        assert stream.rid == "mine"
        assert [item.text for item in stream] == ["only"]
        assert list(stream) == []


def test_validation_and_the_pending_bound(build, block):
    engine = build("echo", max_pending_requests=1)
    with pytest.raises(InvalidRequestError, match="text has 1001 characters") as caught:
        engine.submit(EchoRequest("x" * 1001))
    assert caught.value.field == "text"
    running = engine.submit(EchoRequest("running", before=block))
    block.entered.wait()
    with pytest.raises(EngineOverloadedError):
        engine.step(EchoRequest("more"))
    block.release.set()
    running.result()


def test_control_is_refused(echo):
    with pytest.raises(InvalidRequestError, match="takes no control operations such as Flush"):
        echo.control(Flush())


def test_a_step_inside_a_step_is_refused(echo):
    with pytest.raises(InvalidRequestError, match="inside a step"):
        echo.step(EchoRequest("outer", before=lambda: echo.step(EchoRequest("inner"))))
    assert echo.step(EchoRequest("next")).text == "next"


def test_r69_close_cancels_queued_futures_and_waits_for_the_running_step(echo, block):
    running = echo.submit(EchoRequest("running", before=block))
    block.entered.wait()
    queued = [echo.submit(EchoRequest(str(n))) for n in range(3)]
    stepped = in_thread(echo.step, EchoRequest("step"), rid="step")
    until_live(echo, "step")
    stream = echo.stream(EchoRequest("stream"))
    closing = in_thread(echo.close)
    with pytest.raises(EngineUnavailableError, match="closed"):
        stepped.result()
    with pytest.raises(EngineUnavailableError, match="closed"):
        next(stream)
    assert len(concurrent.futures.wait(queued).done) == 3
    assert all(future.cancelled() for future in queued)
    assert not closing.done()
    assert echo.entry.num_closes == 0
    block.release.set()
    closing.result()
    assert running.result().text == "running"
    assert echo.entry.num_closes == 1
    statistics = echo.statistics()
    assert (statistics.num_in_flight, statistics.num_cancelled) == (0, 5)


def test_r50_s11_a_closed_engine_refuses(echo):
    echo.close()
    future = echo.submit(EchoRequest("late"))
    assert future.done()
    assert isinstance(future.exception(), EngineUnavailableError)
    for call in (echo.step, echo.stream):
        with pytest.raises(EngineUnavailableError, match="closed"):
            call(EchoRequest("late"))


def test_r68_s13_close_again_and_from_several_threads(echo, block):
    running = echo.submit(EchoRequest("running", before=block))
    block.entered.wait()
    closings = [in_thread(echo.close) for _ in range(4)]
    block.release.set()
    for closing in closings:
        closing.result()
    echo.close()
    running.result()
    assert echo.entry.num_closes == 1


def test_close_inside_a_step_happens_after_it(echo):
    assert echo.step(EchoRequest("last", before=echo.close)).text == "last"
    assert echo.entry.num_closes == 1
    with pytest.raises(EngineUnavailableError):
        echo.step(EchoRequest("late"))


def test_close_in_a_futures_callback(echo, block):
    future = echo.submit(EchoRequest("last", before=block))
    closed = threading.Event()
    future.add_done_callback(lambda _: (echo.close(), closed.set()))
    block.release.set()
    closed.wait()
    assert echo.entry.num_closes == 1


def test_close_waits_for_a_step_in_its_callers_thread(echo, block):
    stepped = in_thread(echo.step, EchoRequest("running", before=block))
    block.entered.wait()
    closings = [in_thread(echo.close) for _ in range(2)]
    with executor_of(echo)._changed:
        executor_of(echo)._changed.wait_for(lambda: executor_of(echo)._closing)
    assert echo.entry.num_closes == 0
    block.release.set()
    for closing in closings:
        closing.result()
    assert stepped.result().text == "running"
    assert echo.entry.num_closes == 1


def test_an_interrupted_step_leaves_the_queue(echo, block, interrupt_when):
    running = echo.submit(EchoRequest("running", before=block))
    block.entered.wait()
    interrupt_when(lambda: until_live(echo, "waiting"))
    with pytest.raises(KeyboardInterrupt):
        echo.step(EchoRequest("waiting"), rid="waiting")
    block.release.set()
    assert running.result().text == "running"
    assert echo.step(EchoRequest("next"), rid="waiting").text == "next"
    assert echo.statistics().num_cancelled == 1


def test_a_step_in_a_callback_of_the_worker_is_refused(echo, block):
    first = echo.submit(EchoRequest("first", before=block))
    block.entered.wait()
    second = echo.submit(EchoRequest("second"))
    refused = concurrent.futures.Future()

    def callback(_):
        try:
            echo.step(EchoRequest("third"))
        except InvalidRequestError as error:
            refused.set_result(str(error))

    first.add_done_callback(callback)
    block.release.set()
    assert "future's callback" in refused.result()
    assert second.result().text == "second"
