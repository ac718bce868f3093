"""Operations by their ids: joined, refused, remembered."""

from __future__ import annotations

import asyncio

import pytest

from phalanx.errors import (
    EngineUnavailableError,
    RoleOperationFailedError,
    RoleOperationRefusedError,
)
from phalanx.roles.coordination.phase_operations import (
    PhaseBusyError,
    PhaseOperations,
    RunningOperation,
)
from phalanx.roles.coordination.record import OperationRecord, Outcome
from phalanx.testing.role_faults import Fault
from tests.roles.coordination.case import SPLIT, Phases, run


def test_the_same_id_joins_what_runs_and_another_id_with_the_same_meaning_too():
    async def scenario():
        p = Phases()
        first = await p.amid("activate rollout", p.enter("rollout", operation_id="a"))
        again = [p.enter("rollout", operation_id=name) for name in ("a", "b", "a")]
        documents = await asyncio.gather(first, *again)
        assert {document.phase for document in documents} == {"rollout"}
        assert p.log.count("activate rollout") == 1
        await p.enter("genrm")
        for known in ("a", "b"):
            # A late repetition gets the outcome, and moves nothing back.
            assert (await p.enter("rollout", operation_id=known)).phase == "genrm"
        assert p.log.count("activate rollout") == 1

    run(scenario)


def test_the_same_id_with_another_meaning_is_refused_also_while_it_runs():
    async def scenario():
        p = Phases()
        entering = await p.amid("activate rollout", p.enter("rollout", operation_id="a"))
        with pytest.raises(RoleOperationRefusedError, match="another operation_id") as refused:
            await p.leave(operation_id="a")
        assert not isinstance(refused.value, PhaseBusyError)
        await entering
        for other in (
            p.enter("rollout", "2", "a"),
            p.enter("genrm", "1", "a"),
            p.leave(operation_id="a"),
            p.recover(operation_id="a"),
        ):
            with pytest.raises(RoleOperationRefusedError, match="another operation_id"):
                await other

    run(scenario)


def test_complaint_relax_242_the_outcome_is_known_after_a_restart():
    async def scenario():
        p = Phases()
        await p.enter("rollout", operation_id="a")
        p.faults.next("activate genrm", [Fault.REFUSED])
        with pytest.raises(RoleOperationFailedError) as failed:
            await p.enter("genrm", operation_id="b")
        await p.restart()
        document = await p.enter("rollout", operation_id="a")
        assert document.phase is None, "it was done before the roles ended with the restart"
        with pytest.raises(RoleOperationFailedError) as known:
            await p.enter("genrm", operation_id="b")
        assert str(known.value) == str(failed.value)
        with pytest.raises(RoleOperationRefusedError, match="another operation_id"):
            await p.leave(operation_id="a")
        assert p.log.count("activate rollout") == 1

    run(scenario)


def test_an_operation_that_a_restart_cut_off_is_done_when_it_is_asked_for_again():
    async def scenario():
        p = Phases()
        entering = await p.amid(
            "activate rollout", p.enter("rollout", operation_id="a"), Fault.HANG
        )
        await p.restart()
        with pytest.raises(EngineUnavailableError):
            await entering
        assert (await p.enter("rollout", operation_id="a")).phase == "rollout"

    run(scenario)


def test_a_refusal_is_not_remembered():
    async def scenario():
        p = Phases()
        with pytest.raises(RoleOperationRefusedError):
            await p.enter("genrm", operation_id="a")
        await p.enter("rollout")
        await p.enter("genrm", operation_id="a")

    run(scenario)


def test_nothing_begins_when_the_job_stops():
    async def scenario():
        p = Phases(SPLIT)
        await p.coordinator.close()
        with pytest.raises(EngineUnavailableError, match="stopping"):
            await p.enter("rollout")

    run(scenario)


def test_only_so_many_operations_are_remembered():
    async def nothing():
        pass

    async def scenario():
        operations = PhaseOperations(())
        for number in range(1001):
            operations.note(
                OperationRecord(
                    operation_id=str(number), meaning="rest", outcome=Outcome.DONE, detail=""
                )
            )
        begun = []

        def begin():
            begun.append(True)
            return RunningOperation("rest", None, 0.0), nothing

        await operations.run("1", "rest", begin)
        assert begun == []
        await operations.run("0", "rest", begin)
        assert begun == [True]

    run(scenario)
