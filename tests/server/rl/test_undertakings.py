"""What is asked of the engine is done and noted, though the trainer that asked has left."""

import asyncio
import threading

from phalanx.schema.control import Pause, PauseMode
from phalanx.server.lifecycle import Lifecycle, Phase
from phalanx.server.live import LiveRequests
from phalanx.server.operations.generation import GenerationOperations
from phalanx.server.operations.quiescence import Quiescence
from phalanx.server.operations.undertakings import Undertakings


class SlowEngine:
    """Each operation takes until it is let go."""

    def __init__(self) -> None:
        self.asked, self.go = threading.Event(), threading.Event()
        self.ops: list[object] = []

    def control(self, op: object) -> bool:
        self.asked.set()
        self.go.wait()
        self.ops.append(op)
        return True


def test_a_pause_whose_caller_gave_up_is_known_all_the_same():
    async def scenario() -> None:
        engine, lifecycle = SlowEngine(), Lifecycle(Phase.READY)
        quiescence = Quiescence(lifecycle)
        generation = GenerationOperations(
            engine, LiveRequests(lambda _: True), lifecycle, quiescence, Undertakings()
        )
        with lifecycle.answering():
            asking = asyncio.create_task(generation.pause(PauseMode.IN_PLACE))
            await asyncio.to_thread(engine.asked.wait)
            asking.cancel()
            await asyncio.wait((asking,))
            assert asking.cancelled()
            assert not generation.paused
            engine.go.set()
            # An update that comes now waits for nobody: what lives stands still.
            await quiescence.settled()
        assert generation.paused
        assert engine.ops == [Pause(PauseMode.IN_PLACE)]

    asyncio.run(scenario())


def test_what_fails_with_nobody_there_is_logged(caplog):
    async def scenario() -> None:
        undertakings, go = Undertakings(), asyncio.Event()

        async def work() -> None:
            await go.wait()
            raise RuntimeError("nobody hears this")

        asking = asyncio.create_task(undertakings.done(work()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait((asking,))
        go.set()
        for _ in range(5):
            await asyncio.sleep(0)

    asyncio.run(scenario())
    assert "nobody hears this" in caplog.text
