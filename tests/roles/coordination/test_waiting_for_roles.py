"""Roles that take no turns are waited for while they start, or come back by themselves."""

from __future__ import annotations

import asyncio

import pytest

from phalanx.errors import (
    EngineUnavailableError,
    RoleOperationFailedError,
    RoleOperationRefusedError,
)
from phalanx.roles.coordination.phase_operations import PhaseBusyError
from phalanx.roles.coordination.schedule import Schedule
from phalanx.roles.events import EventKind
from phalanx.roles.outlook import Absence
from phalanx.schema.job_placement import TRAINER, PhaseSpec
from phalanx.schema.roles import PlacementMode
from phalanx.testing.role_faults import Fault
from tests.roles.coordination.case import BUNDLES, SPLIT, Phases, run

STARTING = Absence("model 'judge' is starting")
MIXED = Schedule(
    PlacementMode.DEFER,
    (
        PhaseSpec("rollout", ("rollout",)),
        PhaseSpec("score", ("genrm", "teacher")),
        PhaseSpec("train", (TRAINER,)),
    ),
    {name: its for name, its in BUNDLES.items() if name != "genrm"},
)
"""One role stays, in a phase whose others take turns."""


async def until_waiting(p: Phases) -> None:
    """Until the wait is shown."""
    for _ in range(20):
        document = await p.coordinator.wait(p.document.number, 1.0)
        if document.transition is not None and "until they serve" in document.transition.step:
            return
    raise AssertionError(f"nobody is waited for: {document}")


async def begun(p: Phases, phase: str = "rollout", batch: str = "1") -> asyncio.Task:
    entering = asyncio.create_task(p.enter(phase, batch))
    await until_waiting(p)
    return entering


def now() -> float:
    return asyncio.get_running_loop().time()


def waits(p: Phases) -> list[str]:
    return [
        f"{event.role}: {event.detail}"
        for event in p.events.after(0)
        if event.kind is EventKind.WAITING
    ]


@pytest.mark.parametrize("words", ["model 'judge' is starting", "model 'judge' is dead"])
def test_i91_a_role_that_starts_or_comes_back_is_waited_for(words):
    async def scenario():
        p = Phases(SPLIT)
        p.tenants["rollout"].set_absence(Absence(words))
        entering = await begun(p)
        await asyncio.sleep(50.0)
        assert p.document.transition.step == f"waits until they serve: role 'rollout': {words}"
        assert p.document.phase is None
        assert waits(p) == [f"rollout: phase 'rollout' waits until it serves: {words}"]
        p.tenants["rollout"].set_absence(None)
        assert (await entering).phase == "rollout"
        assert p.document.transition is None

    run(scenario)


def test_what_is_waited_for_is_told_anew_where_it_is_something_else():
    async def scenario():
        p = Phases(Schedule(PlacementMode.SPLIT, (PhaseSpec("both", ("rollout", "genrm")),)))
        p.tenants["rollout"].set_absence(Absence("model 'a' is dead"))
        p.tenants["genrm"].set_absence(STARTING)
        entering = await begun(p, "both")
        p.tenants["rollout"].set_absence(None)
        await asyncio.sleep(2.0)
        assert (
            p.document.transition.step == f"waits until they serve: role 'genrm': {STARTING.words}"
        )
        p.tenants["genrm"].set_absence(None)
        await entering
        assert [line.partition(":")[0] for line in waits(p)] == ["rollout", "genrm", "genrm"]

    run(scenario)


def test_the_start_of_a_role_bounds_the_wait():
    async def scenario():
        p = Phases(SPLIT)
        p.tenants["rollout"].set_absence(STARTING)
        p.tenants["rollout"].startup_timeout_s = 7.0
        began_s = now()
        with pytest.raises(
            RoleOperationFailedError,
            match=r"'rollout' has not begun: role 'rollout': .* is starting, and did not serve within"
            r" 7 s \(deployment.startup_timeout_s\); `phalanx status` and its log say why",
        ):
            await p.enter("rollout")
        assert now() - began_s == 7.0
        p.tenants["rollout"].set_absence(None)
        assert (await p.enter("rollout")).phase == "rollout"

    run(scenario)


def test_a_role_that_cannot_come_by_itself_fails_at_once_and_nothing_was_begun():
    async def scenario():
        p = Phases(SPLIT)
        p.tenants["rollout"].set_absence(Absence("model 'a' is sleeping", "`phalanx wake rollout`"))
        began_s = now()
        with pytest.raises(RoleOperationFailedError, match="is sleeping; `phalanx wake rollout`"):
            await p.enter("rollout", operation_id="a")
        assert now() == began_s
        assert p.journal.num_writes == 1, "that of its start"
        p.tenants["rollout"].set_absence(None)
        assert (await p.enter("rollout", operation_id="a")).phase == "rollout"

    run(scenario)


def test_a_role_that_will_not_come_any_more_ends_the_wait():
    async def scenario():
        p = Phases(SPLIT)
        p.tenants["rollout"].set_absence(STARTING)
        entering = await begun(p)
        p.tenants["rollout"].set_absence(Absence("model 'a' is dead", "`phalanx recover it`"))
        with pytest.raises(RoleOperationFailedError, match="is dead; `phalanx recover it`"):
            await entering
        assert waits(p) == [f"rollout: phase 'rollout' waits until it serves: {STARTING.words}"]

    run(scenario)


@pytest.mark.parametrize("abandon", [False, True])
def test_leave_ends_the_wait(abandon):
    async def scenario():
        p = Phases(SPLIT)
        await p.enter("rollout")
        p.tenants["genrm"].set_absence(STARTING)
        entering = await begun(p, "genrm")
        began_s = now()
        leaving = [asyncio.create_task(p.leave(abandon=abandon)) for _ in range(2)]
        document, _ = await asyncio.gather(*leaving)
        assert (document.phase, document.batch) == (None, None if abandon else "1")
        assert now() - began_s < 1.0
        with pytest.raises(RoleOperationFailedError, match="was asked to .*leave"):
            await entering
        assert (await p.enter("rollout", "2" if abandon else "1")).phase == "rollout"

    run(scenario)


def test_only_leave_ends_the_wait_and_not_one_that_was_done_before():
    async def scenario():
        p = Phases(SPLIT)
        await p.enter("rollout")
        await p.leave(operation_id="before")
        p.tenants["rollout"].set_absence(STARTING)
        entering = await begun(p)
        await p.leave(operation_id="before")
        for other in (p.enter("rollout", "2"), p.enter("genrm"), p.recover()):
            with pytest.raises(PhaseBusyError):
                await other
        with pytest.raises(RoleOperationRefusedError, match="another operation_id"):
            await p.leave(abandon=True, operation_id="before")
        assert not entering.done()
        p.tenants["rollout"].set_absence(None)
        await entering

    run(scenario)


def test_the_end_of_the_job_ends_the_wait():
    async def scenario():
        p = Phases(SPLIT)
        p.tenants["rollout"].set_absence(STARTING)
        entering = await begun(p)
        began_s = now()
        await p.coordinator.close()
        with pytest.raises(EngineUnavailableError, match="stopping"):
            await entering
        assert now() == began_s

    run(scenario)


def test_whoever_asks_for_the_same_waits_too_and_may_leave():
    async def scenario():
        p = Phases(SPLIT)
        p.tenants["rollout"].set_absence(STARTING)
        first = await begun(p)
        second = asyncio.create_task(p.enter("rollout"))
        await asyncio.sleep(1.0)
        first.cancel()
        p.attach("another", holds=True)
        p.tenants["rollout"].set_absence(None)
        assert (await second).phase == "rollout"
        assert waits(p) == [f"rollout: phase 'rollout' waits until it serves: {STARTING.words}"]

    run(scenario)


def test_those_that_take_turns_load_while_one_that_stays_is_waited_for():
    async def scenario():
        p = Phases(MIXED)
        await p.enter("rollout")
        p.tenants["genrm"].set_absence(STARTING)
        entering = await begun(p, "score")
        assert p.really_resident() == ["teacher"]
        assert p.document.phase is None
        p.tenants["genrm"].set_absence(None)
        assert (await entering).phase == "score"

    run(scenario)


@pytest.mark.parametrize("end", ["bound", "leave"])
def test_await_a_role_that_does_not_come_is_compensated(end):
    async def scenario():
        p = Phases(MIXED)
        await p.enter("rollout")
        p.tenants["genrm"].set_absence(STARTING)
        entering = await begun(p, "score")
        if end == "leave":
            await p.leave()
        with pytest.raises(RoleOperationFailedError, match="'score' has not begun"):
            await entering
        assert (p.document.phase, p.holders, p.really_resident()) == (None, set(), [])
        assert p.document.blocked is None

    run(scenario)


def test_await_an_uncertain_role_blocks_where_the_wait_is_compensated():
    async def scenario():
        p = Phases(MIXED)
        await p.enter("rollout")
        p.tenants["genrm"].set_absence(STARTING)
        p.faults.next("deactivate teacher", [Fault.UNANSWERED])
        entering = await begun(p, "score")
        with pytest.raises(RoleOperationRefusedError, match="blocked"):
            await p.leave()
        with pytest.raises(RoleOperationFailedError, match="perhaps holds memory"):
            await entering
        await p.recover()
        await p.leave()

    run(scenario)


def test_what_is_known_to_be_hopeless_disturbs_nobody():
    async def scenario():
        p = Phases(MIXED)
        await p.enter("rollout")
        p.tenants["genrm"].set_absence(Absence("model 'judge' is dead", "recover it"))
        with pytest.raises(RoleOperationFailedError, match="is dead; recover it"):
            await p.enter("score")
        assert (p.document.phase, p.really_resident()) == ("rollout", ["rollout"])

    run(scenario)
