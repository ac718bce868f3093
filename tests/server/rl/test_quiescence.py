"""When nothing runs, and who waits for it."""

import asyncio

from phalanx.schema.control import PauseMode
from phalanx.server.lifecycle import Lifecycle, Phase
from phalanx.server.live import LiveRequests
from phalanx.server.operations.quiescence import Quiescence
from phalanx.server.operations.undertakings import Undertakings
from phalanx.server.operations.update_session import UpdateSession
from phalanx.server.operations.weights import WeightOperations


class NoEngine:
    """Nothing is asked of it."""


def started() -> tuple[Lifecycle, Quiescence]:
    lifecycle = Lifecycle(Phase.READY)
    return lifecycle, Quiescence(lifecycle)


async def turns() -> None:
    """Whatever is ready runs."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_quiet_comes_when_the_last_request_ends_and_holds_new_ones():
    async def scenario() -> None:
        lifecycle, quiescence = started()
        reached, go = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            async with quiescence.quiet():
                reached.set()
                await go.wait()

        with lifecycle.answering():
            working = asyncio.create_task(work())
            await turns()
            assert not reached.is_set()
        await reached.wait()
        entering = asyncio.create_task(lifecycle.admitted())
        await turns()
        assert not entering.done()
        go.set()
        await working
        await entering

    asyncio.run(scenario())


def test_a_pause_makes_it_quiet_though_requests_live():
    async def scenario() -> None:
        lifecycle, quiescence = started()
        with lifecycle.answering():
            settling = asyncio.create_task(quiescence.settled())
            await turns()
            assert not settling.done()
            quiescence.note_pause(PauseMode.IN_PLACE)
            await settling
            quiescence.note_continue()
            settling = asyncio.create_task(quiescence.settled())
            await turns()
            assert not settling.done()
        await settling

    asyncio.run(scenario())


def test_an_engine_asleep_holds_nobody():
    async def scenario() -> None:
        lifecycle, quiescence = started()
        quiescence.open_session()
        entering = asyncio.create_task(lifecycle.admitted())
        await turns()
        assert not entering.done()
        quiescence.note_asleep(True)
        await entering
        quiescence.note_asleep(False)
        entering = asyncio.create_task(lifecycle.admitted())
        await turns()
        assert not entering.done()
        quiescence.close_session()
        await entering

    asyncio.run(scenario())


def test_whoever_leaves_while_waiting_lets_the_others_in():
    async def scenario() -> None:
        lifecycle, quiescence = started()

        async def work() -> None:
            async with quiescence.quiet():
                raise AssertionError

        with lifecycle.answering():
            working = asyncio.create_task(work())
            await turns()
            working.cancel()
            await asyncio.wait((working,))
            await lifecycle.admitted()

    asyncio.run(scenario())


def test_a_session_is_the_second_callers_though_the_first_one_leaves():
    async def scenario() -> None:
        lifecycle, quiescence = started()
        session = UpdateSession(quiescence, lifecycle, 60.0)
        shared = (quiescence, session, Undertakings())
        weights = WeightOperations(NoEngine(), LiveRequests(bool), *shared, dynamic=True)
        with lifecycle.answering():
            first, second = (asyncio.create_task(weights.begin()) for _ in range(2))
            await turns()
            first.cancel()
            await asyncio.wait((first,))
        await second
        entering = asyncio.create_task(lifecycle.admitted())
        await turns()
        assert not entering.done()
        assert await weights.end(None)
        await entering

    asyncio.run(scenario())


def test_a_drain_lets_those_at_the_gate_hear_of_it():
    async def scenario() -> None:
        lifecycle, quiescence = started()
        quiescence.open_session()
        entering = asyncio.create_task(lifecycle.admitted())
        await turns()
        assert not entering.done()
        lifecycle.move(Phase.DRAINING)
        await entering
        with quiescence.holding():
            await lifecycle.admitted()

    asyncio.run(scenario())
