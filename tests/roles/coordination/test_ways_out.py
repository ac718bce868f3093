"""Replicas that end, or cannot be ended, at bad moments: the job goes on, or somebody's word lets it."""

from __future__ import annotations

import asyncio

import pytest

from phalanx.errors import RoleOperationFailedError
from phalanx.testing.role_faults import Fault
from phalanx.testing.virtual_time import run_virtual
from tests.roles.coordination.test_on_managers import World


async def _rollout_sleeps(*, says: bool = False) -> World:
    world = World(says=says)
    await world.enter("rollout")
    await world.enter("genrm")
    return world


def test_clear_a_sleeper_that_dies_meanwhile_is_waited_for():
    async def scenario():
        w = await _rollout_sleeps()
        w.engines.faults.always("release", Fault.SLOW)
        w.engines.faults.always("stop", Fault.SLOW)
        entering = asyncio.create_task(w.enter("teacher"))
        await asyncio.sleep(1.0)
        w.engines.engine("student/0").crash()
        await entering
        assert w.coordinator.document.blocked is None
        await w.end()

    run_virtual(scenario())


def test_d9_somebodys_word_frees_processes_that_cannot_be_stopped():
    async def scenario():
        w = await _rollout_sleeps()
        w.engines.faults.always("stop", Fault.REFUSED)
        w.engines.engine("student/0").crash()
        with pytest.raises(RoleOperationFailedError, match="could not be stopped"):
            await w.enter("teacher")
        with pytest.raises(RoleOperationFailedError, match="could not be stopped"):
            await w.recover()
        with pytest.raises(RoleOperationFailedError, match="could not be stopped"):
            await w.managers["rollout"].recover("student/0")
        w.coordinator.look_again()
        assert w.coordinator.document.blocked is not None
        await w.recover("rollout")
        await w.enter("teacher")
        w.engines.faults.stop()
        await w.end()

    run_virtual(scenario())


def test_what_is_left_of_a_failed_revival_is_stopped_when_its_role_makes_way():
    async def scenario():
        w = World()
        for phase in ("rollout", "genrm", "teacher"):
            await w.enter(phase)
        w.engines.faults.next("stop", [None, Fault.REFUSED, Fault.REFUSED])
        w.engines.faults.next("healthy", [Fault.CRASH])
        w.engines.engine("big/0").crash()
        await asyncio.sleep(0.5)
        assert w.managers["teacher"].residency() == {"big/0": None}
        await w.enter("rollout")
        assert w.managers["teacher"].residency() == {}
        await w.end()

    run_virtual(scenario())


def test_activate_a_replica_that_stays_blocked_is_a_failure_and_no_refusal():
    async def scenario():
        w = World(says=False)
        await w.enter("rollout")
        w.engines.faults.next("release", [Fault.UNANSWERED])
        with pytest.raises(RoleOperationFailedError, match="perhaps holds memory"):
            await w.enter("genrm")
        w.engines.faults.always("pause", Fault.UNSENT)
        await w.recover("rollout")
        w.engines.faults.stop()
        await w.enter("genrm")
        with pytest.raises(RoleOperationFailedError, match="unblock or recover it"):
            await w.enter("rollout")
        assert w.coordinator.document.phase is None, "it was begun"
        await w.managers["rollout"].recover("student/0")
        await w.enter("rollout")
        await w.end()

    run_virtual(scenario())
