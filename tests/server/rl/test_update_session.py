"""An update in several parts whose trainer is not heard of any more."""

import asyncio

import pytest

from phalanx.errors import InvalidRequestError, RequestFailedError, WeightUpdateError
from phalanx.server.lifecycle import Lifecycle, Phase
from phalanx.server.operations.quiescence import Quiescence
from phalanx.server.operations.update_session import UpdateSession

AT_ONCE = 0.0


def started(timeout_s: float) -> tuple[Lifecycle, UpdateSession]:
    lifecycle = Lifecycle(Phase.READY)
    return lifecycle, UpdateSession(Quiescence(lifecycle), lifecycle, timeout_s)


async def turns() -> None:
    """Whatever is ready runs, timers that are due too."""
    for _ in range(5):
        await asyncio.sleep(0)


def changed(session: UpdateSession, error: Exception | None = None) -> None:
    with session.working():
        if error is not None:
            raise error


def test_one_that_has_changed_nothing_is_over_and_requests_go_on(caplog):
    async def scenario() -> None:
        lifecycle, session = started(AT_ONCE)
        session.begin()
        await lifecycle.admitted()
        assert lifecycle.refusal is None
        assert not session.end()

    asyncio.run(scenario())
    assert "not heard of for 0 s" in caplog.text


def test_one_that_has_changed_something_refuses_requests_until_it_is_ended():
    async def scenario() -> None:
        lifecycle, session = started(AT_ONCE)
        session.begin()
        changed(session)
        await lifecycle.admitted()
        assert "not heard of for 0 s" in str(lifecycle.refusal)
        assert session.end()
        assert lifecycle.refusal is None
        await turns()
        assert lifecycle.refusal is None

    asyncio.run(scenario())


def test_time_begins_anew_with_each_call_and_stands_still_while_one_is_under_way():
    async def scenario() -> None:
        lifecycle, session = started(AT_ONCE)
        session.begin()
        with session.working():
            entering = asyncio.create_task(lifecycle.admitted())
            await turns()
            assert not entering.done()
        await entering
        assert lifecycle.refusal is not None
        with session.working():  # the trainer is there again: requests wait for it
            assert lifecycle.refusal is None

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("error", "refused", "held"),
    [
        (WeightUpdateError("the trainer is gone"), True, False),
        (RequestFailedError("weights are lost"), False, True),
        (InvalidRequestError("no such weight"), False, True),
    ],
)
def test_a_group_that_breaks_gives_it_up_and_other_failures_do_not(error, refused, held):
    async def scenario() -> None:
        lifecycle, session = started(60.0)
        session.begin()
        changed(session)
        with pytest.raises(type(error)):
            changed(session, error)
        entering = asyncio.create_task(lifecycle.admitted())
        await turns()
        assert (lifecycle.refusal is not None, not entering.done()) == (refused, held)
        session.end()
        await entering

    asyncio.run(scenario())


def test_a_group_that_breaks_before_anything_has_come_leaves_the_old_weights_serving():
    async def scenario() -> None:
        lifecycle, session = started(60.0)
        session.begin()
        with pytest.raises(WeightUpdateError):
            changed(session, WeightUpdateError("the trainer is gone"))
        await lifecycle.admitted()
        assert lifecycle.refusal is None

    asyncio.run(scenario())
