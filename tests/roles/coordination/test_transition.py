"""From phase to phase: who has gone, and who comes, in which order."""

from __future__ import annotations

import asyncio

import pytest

from phalanx.errors import (
    ConfigurationError,
    RoleOperationFailedError,
    RoleOperationRefusedError,
)
from phalanx.roles.coordination.phase_operations import PhaseBusyError
from phalanx.roles.outlook import Absence
from phalanx.testing.role_faults import Fault
from phalanx.wire.phases import Holding
from tests.roles.coordination.case import PHASES, PID, SPLIT, Phases, run, trainer_on_its_way


def test_i91_a_batch_goes_through_its_phases_and_everybody_has_gone_before_the_next_one_comes():
    async def scenario():
        p = Phases()
        p.attach()
        await p.up_to("train")
        assert p.log == [
            "activate rollout",
            "activate rollout: done",
            "rollout is told phase rollout",
            "genrm is told phase rollout",
            "teacher is told phase rollout",
            "deactivate rollout",
            "deactivate rollout: done",
            "activate genrm",
            "activate genrm: done",
            "rollout is told phase genrm",
            "genrm is told phase genrm",
            "teacher is told phase genrm",
            "deactivate genrm",
            "deactivate genrm: done",
            "activate teacher",
            "activate teacher: done",
            "rollout is told phase teacher",
            "genrm is told phase teacher",
            "teacher is told phase teacher",
            "deactivate teacher",
            "deactivate teacher: done",
            "rollout is told phase train",
            "genrm is told phase train",
            "teacher is told phase train",
        ]
        assert p.document.trainer_holding is Holding.MEMORY
        assert p.holders == {"trainer"}
        p.release()
        assert p.holders == set()
        assert (p.document.phase, p.document.batch) == (None, "1")
        await p.enter("rollout", "2")
        assert (p.document.phase, p.document.batch) == ("rollout", "2")

    run(scenario)


def test_i91_each_transition_is_in_the_events():
    async def scenario():
        p = Phases()
        await p.up_to("genrm")
        devices = "n0:0, n0:1"
        assert p.told() == [
            "enter 'rollout' of batch '1': begun",
            f"rollout has the lease of {devices}",
            "enter 'rollout' of batch '1': done",
            "enter 'genrm' of batch '1': begun",
            f"rollout gave up {devices}",
            f"genrm has the lease of {devices}",
            "enter 'genrm' of batch '1': done",
        ]

    run(scenario)


def test_i92_no_lease_is_given_up_by_somebody_who_may_hold_something():
    async def scenario():
        p = Phases()
        await p.enter("rollout")
        p.faults.next("deactivate rollout", [Fault.UNANSWERED])
        with pytest.raises(RoleOperationFailedError, match="perhaps holds memory on n0:0, n0:1"):
            await p.enter("genrm")
        assert p.holders == {"rollout"}
        assert "rollout" in (p.document.blocked or "")
        assert "activate genrm" not in p.log
        for again in (p.enter("genrm"), p.leave(), p.enter("rollout")):
            with pytest.raises(RoleOperationRefusedError, match="blocked.*phalanx phase recover"):
                await again
        await p.recover()
        assert p.document.blocked is None
        assert p.holders == set()
        await p.enter("genrm")
        assert p.really_resident() == ["genrm"]

    run(scenario)


def test_i93_the_trainer_is_let_in_when_the_last_scorer_sleeps_for_certain():
    async def scenario():
        p, entering = await trainer_on_its_way(Fault.HANG)
        assert p.document.trainer_holding is Holding.NOTHING
        assert p.document.transition is not None
        assert p.document.transition.phase == "train"
        assert "given their memory back" in p.document.transition.step
        assert not entering.done()
        await p.coordinator.close()
        await asyncio.gather(entering, return_exceptions=True)
        assert p.document.trainer_holding is Holding.NOTHING

    run(scenario)


def test_i93_an_uncertain_scorer_keeps_the_trainer_out():
    async def scenario():
        p = Phases()
        p.attach()
        await p.up_to("teacher")
        p.faults.next("deactivate teacher", [Fault.UNSENT])
        with pytest.raises(RoleOperationFailedError):
            await p.enter("train")
        assert p.document.trainer_holding is Holding.NOTHING
        assert p.holders == {"teacher"}

    run(scenario)


def test_i93_roles_stay_out_while_the_trainer_holds():
    async def scenario():
        p = Phases()
        p.attach()
        await p.up_to("train")
        for refused in (p.enter("rollout", "2"), p.enter("teacher"), p.leave()):
            with pytest.raises(RoleOperationRefusedError, match=r"'t' holds n0:0, n0:1 and must"):
                await refused
        assert p.really_resident() == ["trainer"]

    run(scenario)


def test_i93_the_trainers_phase_needs_a_trainer():
    async def scenario():
        p = Phases()
        await p.up_to("teacher")
        with pytest.raises(RoleOperationRefusedError, match="no trainer has told of itself"):
            await p.enter("train")

    run(scenario)


def test_i94_an_operator_is_told_that_the_phases_move_a_role():
    p = Phases()
    with pytest.raises(RoleOperationRefusedError, match="phalanx phase enter rollout --batch"):
        p.coordinator.check_operator("rollout", "wake it")
    Phases(SPLIT).coordinator.check_operator("rollout", "wake it")


def test_i92_nothing_is_loaded_without_a_lease():
    async def scenario():
        p = Phases()
        with pytest.raises(RoleOperationRefusedError, match="rollout has no lease"):
            p.coordinator.check_lease("rollout")
        await p.enter("rollout")
        p.coordinator.check_lease("rollout")
        with pytest.raises(RoleOperationRefusedError):
            p.coordinator.check_lease("genrm")
        Phases(SPLIT).coordinator.check_lease("rollout")

    run(scenario)


@pytest.mark.parametrize(
    ("after", "phase", "batch", "words"),
    [
        ("", "genrm", "1", "a batch begins with 'rollout'"),
        ("rollout", "teacher", "1", "cannot follow 'rollout'; enter 'genrm' first"),
        ("rollout", "rollout", "2", "'1' is in its phase 'rollout' and ends with 'train'"),
        ("teacher", "genrm", "2", "cannot begin; enter 'train' of batch '1'"),
        ("train", "genrm", "2", "a batch begins with 'rollout'"),
    ],
)
def test_the_order_of_phases_is_kept(after, phase, batch, words):
    async def scenario():
        p = Phases()
        p.attach()
        if after:
            await p.up_to(after)
        before = (p.document.phase, p.holders)
        with pytest.raises(RoleOperationRefusedError, match=words):
            await p.enter(phase, batch)
        assert (p.document.phase, p.holders) == before

    run(scenario)


def test_an_earlier_phase_of_the_batch_may_be_entered_again_and_what_follows_it():
    async def scenario():
        p = Phases()
        await p.up_to("teacher")
        await p.enter("rollout")
        with pytest.raises(RoleOperationRefusedError):
            await p.enter("teacher")
        await p.enter("genrm")
        await p.enter("genrm")
        await p.enter("teacher")

    run(scenario)


def test_a_batch_that_is_given_up_makes_room_for_another_one():
    async def scenario():
        p = Phases()
        await p.up_to("genrm")
        await p.leave()
        assert (p.document.phase, p.document.batch) == (None, "1")
        assert p.really_resident() == []
        with pytest.raises(RoleOperationRefusedError):
            await p.enter("rollout", "2")
        await p.leave(abandon=True)
        assert p.document.batch is None
        await p.enter("rollout", "2")

    run(scenario)


def test_an_unknown_phase_and_unusable_names_are_refused():
    async def scenario():
        p = Phases()
        with pytest.raises(ConfigurationError, match="phases: rollout, genrm, teacher, train"):
            await p.enter("scor")
        for batch in ("", "a\nb", "x" * 201):
            with pytest.raises(ConfigurationError, match="batch="):
                await p.enter("rollout", batch)
        with pytest.raises(ConfigurationError, match="operation_id="):
            await p.enter("rollout", "1", "\n")
        with pytest.raises(ConfigurationError, match="neither a role nor the trainer"):
            await p.recover("nobody")

    run(scenario)


def test_another_operation_waits_for_its_turn_outside():
    async def scenario():
        p = Phases()
        entering = await p.amid("activate rollout", p.enter("rollout", operation_id="a"))
        with pytest.raises(PhaseBusyError, match="asked to enter 'rollout' of batch '1'"):
            await p.leave()
        await entering

    run(scenario)


def test_in_a_job_whose_roles_stay_the_same_calls_move_nothing():
    async def scenario():
        p = Phases(SPLIT)
        p.attach(holds=True)
        await p.up_to("train")
        assert all("phase" in line for line in p.log)
        assert p.tenants["rollout"].phase == "train"
        with pytest.raises(RoleOperationRefusedError):
            await p.enter("genrm", "2")
        await p.enter("rollout", "2")
        p.tenants["genrm"].set_absence(Absence("model judge is dead", "recover it"))
        with pytest.raises(RoleOperationFailedError, match="role 'genrm': model judge is dead"):
            await p.enter("genrm", "2")
        assert p.document.phase == "rollout"
        assert p.document.leases == ()
        await p.leave(abandon=True)
        assert p.document.phase is None

    run(scenario)


def test_a_caller_who_leaves_does_not_end_the_operation():
    async def scenario():
        p = Phases()
        entering = await p.amid("activate rollout", p.enter("rollout"))
        entering.cancel()
        document = p.document
        while document.transition is not None:
            document = await p.coordinator.wait(document.number, 60.0)
        assert document.phase == "rollout"

    run(scenario)


def test_whoever_waits_hears_of_each_change_and_of_the_end():
    async def scenario():
        p = Phases()
        before = p.document
        assert await p.coordinator.wait(before.number - 1, 60.0) == before
        assert await p.coordinator.wait(before.number, 1.0) == before
        waiting = asyncio.create_task(p.coordinator.wait(before.number, 60.0))
        await p.enter("rollout")
        assert (await waiting).number > before.number
        waiting = asyncio.create_task(p.coordinator.wait(p.document.number, 60.0))
        await asyncio.sleep(0)
        await p.coordinator.close()
        await waiting

    run(scenario)


def test_the_document_says_who_is_on_every_device():
    async def scenario():
        p = Phases()
        p.attach(pid=PID)
        assert {view.holder for view in p.document.leases} == {None}
        assert [view.name for view in p.document.phases] == [phase.name for phase in PHASES]
        await p.enter("rollout")
        assert [(view.bundle, view.holder, view.holding) for view in p.document.leases] == [
            ("n0:0", "rollout", Holding.MEMORY),
            ("n0:1", "rollout", Holding.MEMORY),
        ]
        assert p.document.trainer_id == "t"

    run(scenario)
