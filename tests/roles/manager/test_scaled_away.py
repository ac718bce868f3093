"""What is left of replicas that a failed scale has started, and whose processes did not end."""

from __future__ import annotations

import asyncio

import pytest

from phalanx.errors import PhalanxError, RoleOperationFailedError, UnknownModelError
from phalanx.roles.contracts import ALL_TAGS
from phalanx.testing.role_faults import Fault
from tests.roles.manager.case import case, model, run


async def with_remains(**deployment):
    """One replica serves; a second could neither come up nor be stopped, and still cannot."""
    c = case(model(elastic_enabled=True, router=True), **deployment)
    await c.manager.start()
    c.world.faults.always("router.add", Fault.REFUSED)
    c.world.faults.always("stop", Fault.UNSENT)
    with pytest.raises(PhalanxError):
        await c.manager.scale("m", 2)
    assert c.shown("m/1") is None
    assert c.manager.residency() == {"m/0": ALL_TAGS, "m/1": None}
    return c


async def gone(c) -> None:
    assert "m/1" not in c.manager.residency()
    assert [engine.launch.engine_id for engine in c.world.running] == ["m/0"]
    with pytest.raises(UnknownModelError, match="it has m/0$"):
        await c.manager.recover("m/1")
    await c.manager.shutdown()
    assert not c.world.running


def test_d9_what_a_failed_scale_has_left_is_stopped_as_soon_as_that_works():
    async def scenario():
        c = await with_remains()
        await asyncio.sleep(1000.0)
        assert c.manager.residency()["m/1"] is None
        c.world.faults.stop()
        await asyncio.sleep(100.0)
        await gone(c)

    run(scenario)


@pytest.mark.parametrize("operation", ["unblock", "recover", "deactivate"])
def test_d9_an_operator_reaches_what_a_failed_scale_has_left(operation):
    async def scenario():
        c = await with_remains()
        act = getattr(c.manager, operation)
        arguments = () if operation == "deactivate" else ("m/1",)
        with pytest.raises(RoleOperationFailedError, match="m/1: its processes could not be stop"):
            await act(*arguments)
        assert c.manager.residency()["m/1"] is None
        c.world.faults.stop()
        await act(*arguments)
        await gone(c)

    run(scenario)


def test_it_is_tried_again_by_itself_after_an_operator_could_not_stop_it_either():
    async def scenario():
        c = await with_remains()
        with pytest.raises(RoleOperationFailedError):
            await c.manager.unblock("m/1")
        c.world.faults.stop()
        await asyncio.sleep(100.0)
        await gone(c)

    run(scenario)


def test_the_next_scale_starts_nothing_beside_it():
    async def scenario():
        c = await with_remains()
        c.world.faults.always("router.add", None)
        with pytest.raises(RoleOperationFailedError, match="m/1"):
            await c.manager.scale("m", 2)
        assert len(c.world.running) == 2
        c.world.faults.stop()
        await c.manager.scale("m", 2)
        assert c.engine("m/1").launch.generation == 2
        assert c.manager.residency() == {"m/0": ALL_TAGS, "m/1": ALL_TAGS}
        assert len(c.world.running) == 2
        await c.manager.shutdown()

    run(scenario)


def test_a_shutdown_stops_it_too():
    async def scenario():
        c = await with_remains()
        c.world.faults.stop()
        await c.manager.shutdown()
        assert not c.world.running
        assert c.manager.residency() == {}

    run(scenario)


def test_a_replica_that_never_started_is_unblocked_by_stopping_what_is_left_of_it():
    async def scenario():
        c = case(start_asleep=True)
        c.world.faults.always("healthy", Fault.CRASH)
        c.world.faults.always("stop", Fault.UNSENT)
        c.world.faults.next("healthy", [Fault.HANG] * 100)
        with pytest.raises(PhalanxError):
            await c.manager.activate()
        assert c.manager.residency() == {"m/0": None}
        c.world.faults.stop()
        await c.manager.unblock("m/0")
        assert c.manager.residency() == {}
        assert not c.world.running
        await c.manager.shutdown()

    run(scenario)
