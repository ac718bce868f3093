from __future__ import annotations

import asyncio
import gc

import pytest

from phalanx import EngineUnavailableError, RequestFailedError
from phalanx.engine.async_streams import AsyncSink
from phalanx.engine.executors.loop_thread import Close
from phalanx.engine.mailbox import Mailbox
from phalanx.errors import StreamStalledError
from phalanx.plugin import Delta
from phalanx.schema.control import Pause
from phalanx.testing import CountDelta, CountOutput, CountRequest, Fault

from .conftest import executor_of


async def collect(stream):
    return [item async for item in stream]


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts the wake-ups that come from other threads."""

    def __init__(self):
        super().__init__()
        self.num_wakeups = 0

    def call_soon_threadsafe(self, *args, **kwargs):
        self.num_wakeups += 1
        return super().call_soon_threadsafe(*args, **kwargs)


def test_deltas_come_as_they_are_made_and_the_output_is_last(gated, gate):
    async def main():
        async with gated.astream(CountRequest(count=3), rid="mine") as stream:
            assert (stream.rid, stream.queue_time_s) == ("mine", None)
            for n in range(2):
                gate.let_pass()
                assert await anext(stream) == CountDelta((n,))
            gate.open()
            assert (await collect(stream))[-1] == CountOutput((0, 1, 2))
            assert stream.queue_time_s == 0.0
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    asyncio.run(main())


def test_a_plain_plugins_output_arrives(echo):
    from phalanx.testing import EchoRequest

    async def main():
        return await collect(echo.astream(EchoRequest("hello")))

    assert [output.text for output in asyncio.run(main())] == ["hello"]


def test_one_wake_up_a_tick_for_all_streams(build, gate):
    engine = build(before_tick=gate)
    loop = CountingLoop()

    async def main():
        blocker = engine.astream(CountRequest(count=1))
        gate.await_tick()
        streams = [engine.astream(CountRequest(count=4)) for _ in range(7)]
        tasks = [asyncio.create_task(collect(stream)) for stream in streams]
        await asyncio.sleep(0)  # all of them wait now
        loop.num_wakeups = 0
        gate.open()
        results = await asyncio.gather(*tasks)
        assert all(result[-1] == CountOutput((0, 1, 2, 3)) for result in results)
        assert await collect(blocker)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())
    # One tick ends the blocker, four serve the seven streams.
    assert 1 <= loop.num_wakeups <= 5


def test_one_wake_up_for_all_ticks_that_a_busy_event_loop_missed(build, gate):
    engine = build(before_tick=gate)
    loop = CountingLoop()

    async def main():
        task = asyncio.create_task(collect(engine.astream(CountRequest(count=5))))
        await asyncio.sleep(0)
        gate.await_tick()
        loop.num_wakeups = 0
        for _ in range(3):
            gate.let_pass()
            gate.await_tick()
        assert loop.num_wakeups == 1
        gate.open()
        assert (await task)[0].numbers[:3] == (0, 1, 2)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())


def test_output_that_arrives_while_a_reader_turns_to_waiting_is_seen(clock):
    class Racing(asyncio.SelectorEventLoop):
        def create_future(self):
            if arriving:
                sink.put(arriving.pop(), 0.0)
            return super().create_future()

    loop = Racing()
    arriving = []
    sink = AsyncSink(Mailbox(loop), clock)

    async def main():
        arriving.append(Delta("r", "late"))
        return await sink.next()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        assert runner.run(main()) == Delta("r", "late")


def test_a_failed_request_raises(counting):
    async def main():
        with pytest.raises(RequestFailedError, match="fails as it was told to"):
            await collect(counting.astream(CountRequest(count=3, fault=Fault.FAIL)))

    asyncio.run(main())


def test_cancel_goes_on_to_the_last_item(gated, gate):
    async def main():
        stream = gated.astream(CountRequest(count=1000))
        gate.let_pass()
        assert await anext(stream) == CountDelta((0,))
        stream.cancel()
        gate.open()
        output = (await collect(stream))[-1]
        assert isinstance(output, CountOutput)
        assert len(output.numbers) < 1000

    asyncio.run(main())


@pytest.mark.parametrize("how", ["aclose", "leave", "drop", "cancel task"])
def test_a_stream_that_ends_early_cancels_its_request(gated, gate, how):
    async def main():
        stream = gated.astream(CountRequest(count=1000))
        gate.let_pass()
        await anext(stream)
        if how == "aclose":
            await stream.aclose()
            assert await collect(stream) == []
        elif how == "leave":
            async with stream:
                pass
        elif how == "cancel task":
            task = asyncio.create_task(collect(stream))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            del task
        del stream
        gc.collect()

    asyncio.run(main())
    gate.open()
    assert gated.control(Pause())
    statistics = gated.statistics()
    assert (statistics.num_cancelled, statistics.num_in_flight) == (1, 0)
    assert statistics.loop.num_generated_tokens < 1000


def test_a_task_cancelled_while_it_waits_loses_nothing(gated, gate):
    async def main():
        stream = gated.astream(CountRequest(count=2))
        task = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open()
        items = await collect(stream)
        assert items[-1] == CountOutput((0, 1))
        assert sum((item.numbers for item in items[:-1]), ()) == (0, 1)

    asyncio.run(main())


def test_a_closed_event_loop_does_not_hurt_the_engine(gated, gate):
    async def main():
        task = asyncio.create_task(collect(stream := gated.astream(CountRequest(count=1000))))
        await asyncio.sleep(0)
        task.cancel()
        return stream

    stream = asyncio.run(main())
    gate.open()
    assert gated.step(CountRequest(count=3)) == CountOutput((0, 1, 2))
    # Its request was cancelled, since nobody can read it any more.
    assert gated.statistics().num_in_flight == 0
    assert gated.statistics().num_cancelled == 1
    assert gated.statistics().loop.num_generated_tokens < 1000
    del stream


def test_a_blocked_event_loop_is_cut_off(build, gate, clock):
    engine = build(before_tick=gate, stall_timeout_s=5.0)

    async def main():
        stream = engine.astream(CountRequest(count=1000), rid="stalled")
        gate.let_pass()
        gate.await_tick()
        gate.await_tick()
        clock.advance(6.0)
        gate.let_pass()
        gate.await_tick()
        gate.open()
        assert await anext(stream) == CountDelta((0,))
        with pytest.raises(StreamStalledError):
            await anext(stream)

    asyncio.run(main())


def test_streams_of_several_event_loops(counting):
    async def main():
        return [
            items[-1]
            for items in await asyncio.gather(
                *(collect(counting.astream(CountRequest(count=n))) for n in range(5))
            )
        ]

    expected = [CountOutput(tuple(range(n))) for n in range(5)]
    assert asyncio.run(main()) == expected
    assert asyncio.run(main()) == expected


def test_close_ends_waiting_streams(gated, gate):
    async def main():
        task = asyncio.create_task(collect(gated.astream(CountRequest(count=1000))))
        await asyncio.sleep(0)
        gate.await_tick()
        executor_of(gated)._loop._inbox.put(Close())
        gate.open()
        await asyncio.to_thread(gated.close)
        with pytest.raises(EngineUnavailableError, match="closed"):
            await task
        with pytest.raises(EngineUnavailableError, match="closed"):
            gated.astream(CountRequest(count=1))

    asyncio.run(main())
