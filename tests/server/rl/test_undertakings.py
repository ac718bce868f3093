"""What is asked of the engine is done and noted, though the trainer that asked has left."""

import asyncio
import threading

from starlette.requests import Request

from phalanx.schema.control import Pause, PauseMode, Sleep, Wake
from phalanx.schema.statistics import EngineMemory
from phalanx.server.answering import Answering
from phalanx.server.dialects import Refusals
from phalanx.server.lifecycle import Lifecycle, Phase
from phalanx.server.live import LiveRequests
from phalanx.server.metrics import ServerMetrics
from phalanx.server.operations.generation import GenerationOperations
from phalanx.server.operations.memory import MemoryOperations
from phalanx.server.operations.quiescence import Quiescence
from phalanx.server.operations.undertakings import Undertakings
from phalanx.server.operations.update_session import UpdateSession
from phalanx.server.operations.weights import WeightOperations
from phalanx.server.routes.vllm import VllmRoutes


class SlowEngine:
    """Each operation takes until it is let go."""

    def __init__(self) -> None:
        self.asked, self.go = threading.Event(), threading.Event()
        self.ops: list[object] = []
        self.memory = EngineMemory()

    def statistics(self) -> None:
        """Nobody counts."""

    def control(self, op: object) -> bool:
        self.asked.set()
        self.go.wait()
        self.ops.append(op)
        if isinstance(op, Sleep | Wake):
            self.memory = EngineMemory(asleep=op.tags if isinstance(op, Sleep) else frozenset())
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


def test_a_sleep_whose_caller_gave_up_and_asked_again_is_over_with_the_wake():
    async def scenario() -> None:
        engine, lifecycle, left = SlowEngine(), Lifecycle(Phase.READY), asyncio.Event()
        live, quiescence, undertakings = LiveRequests(bool), Quiescence(lifecycle), Undertakings()
        shared = (quiescence, undertakings)
        generation = GenerationOperations(engine, live, lifecycle, *shared)
        memory = MemoryOperations(engine, *shared)
        session = UpdateSession(quiescence, lifecycle, 60.0)
        weights = WeightOperations(engine, live, quiescence, session, undertakings, dynamic=True)
        answering = Answering(100, Refusals(1), ServerMetrics(engine.statistics))
        routes = VllmRoutes(generation, memory, weights, answering).posts()

        async def ask(path: str, leaves: asyncio.Event) -> int:
            sent = [{"type": "http.request", "body": b""}]

            async def receive() -> dict[str, object]:
                if sent:
                    return sent.pop()
                await leaves.wait()
                return {"type": "http.disconnect"}

            scope = {"type": "http", "headers": [], "query_string": b"", "path": path}
            return (await routes[path](Request(scope, receive))).status_code

        asking = asyncio.create_task(ask("/sleep", left))
        await asyncio.to_thread(engine.asked.wait)
        left.set()
        assert await asking == 499
        engine.go.set()
        with lifecycle.answering():
            await quiescence.settled()  # the pause is done
        stays = asyncio.Event()
        assert await ask("/sleep", stays) == 200
        assert await ask("/wake_up", stays) == 200
        assert not generation.paused

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
