"""What the trainer said before it had its devices is no word on what it holds now, however late it
arrives; found by the model check, and shown plainly here.
"""

from __future__ import annotations

import asyncio

import pytest

from phalanx.errors import RoleOperationFailedError
from phalanx.roles.coordination.phase_operations import PhaseBusyError
from phalanx.roles.coordination.schedule import Schedule
from phalanx.schema.job_placement import TRAINER, PhaseSpec
from phalanx.wire.phases import AttachTrainer, Holding, Recover, ReleaseTrainer
from tests.roles.coordination.case import DEFER, PID, Phases, run, trainer_on_its_way


async def training() -> tuple[Phases, int]:
    """A trainer has its devices. The number of a document of just before that."""
    p = Phases()
    p.attach()
    await p.up_to("teacher")
    seen = p.document.number
    await p.enter("train")
    return p, seen


def check_holds(p: Phases) -> None:
    assert p.holders == {TRAINER}
    assert p.document.trainer_holding is Holding.MEMORY


def test_d9_a_release_that_took_long_to_arrive_frees_nothing():
    async def scenario():
        p, seen = await training()
        with pytest.raises(PhaseBusyError, match=f"seen={seen}.*got its devices since"):
            p.coordinator.release(ReleaseTrainer("t", seen))
        check_holds(p)
        p.coordinator.release(ReleaseTrainer("t", p.document.number))
        assert p.holders == set()

    run(scenario)


def test_d9_an_attach_that_took_long_to_arrive_frees_nothing():
    async def scenario():
        p, seen = await training()
        with pytest.raises(PhaseBusyError):
            p.coordinator.attach(AttachTrainer("t", False, PID, seen))
        check_holds(p)
        p.coordinator.attach(AttachTrainer("t", False, PID, p.document.number))
        assert p.holders == set()

    run(scenario)


def test_d9_somebodys_word_for_the_trainer_that_took_long_to_arrive_frees_nothing():
    async def scenario():
        p, seen = await training()
        with pytest.raises(PhaseBusyError):
            await p.coordinator.recover(Recover("r", (TRAINER,), seen))
        check_holds(p)
        await p.coordinator.recover(Recover("r", (TRAINER,), p.document.number))
        assert p.holders == set()

    run(scenario)


def test_d9_it_is_as_late_after_a_restart():
    async def scenario():
        p, seen = await training()
        await p.restart()
        with pytest.raises(PhaseBusyError):
            p.coordinator.release(ReleaseTrainer("t", seen))
        assert p.holders == {TRAINER}
        p.coordinator.release(ReleaseTrainer("t", p.document.number))
        assert p.holders == set()

    run(scenario)


def test_d9_a_trainer_that_enters_its_phase_again_keeps_its_lease_where_that_fails():
    async def scenario():
        p, _ = await training()
        entering = asyncio.create_task(p.enter("train"))
        await asyncio.sleep(0)
        p.journal.broken = 3
        with pytest.raises(RoleOperationFailedError, match="no space left"):
            await entering
        check_holds(p)
        p.journal.broken = 0
        await p.enter("train")
        check_holds(p)

    run(scenario)


def test_a_trainer_that_attaches_anew_is_not_given_what_the_one_before_it_asked_for():
    async def scenario():
        p, entering = await trainer_on_its_way()
        p.processes.end(PID)
        p.processes.start(PID + 1)
        p.attach(pid=PID + 1)
        with pytest.raises(RoleOperationFailedError, match="told of itself anew"):
            await entering
        assert p.holders == set()
        assert p.document.trainer_holding is Holding.NOTHING
        await p.enter("train")
        check_holds(p)

    run(scenario)


def test_nobody_attaches_while_the_trainer_gets_its_devices():
    async def scenario():
        phases = (PhaseSpec("rest", ("rollout", "teacher")), PhaseSpec("both", ("genrm", TRAINER)))
        bundles = {"rollout": ("n:0",), "teacher": ("n:1",), "genrm": ("n:0",), TRAINER: ("n:1",)}
        p = Phases(Schedule(DEFER.mode, phases, bundles))
        p.attach()
        await p.up_to("rest")
        entering = await p.amid("activate genrm", p.enter("both"))
        with pytest.raises(PhaseBusyError, match="devices change hands"):
            p.attach()
        await entering
        assert p.holders == {"genrm", TRAINER}
        assert p.document.trainer_holding is Holding.MEMORY

    run(scenario)
