"""What follows where a step of entering a phase fails: what is certain is given back, what is not is
kept.
"""

from __future__ import annotations

import pytest

from phalanx.errors import RoleOperationFailedError, RoleOperationRefusedError
from phalanx.roles.coordination.schedule import Schedule
from phalanx.roles.coordination.steps import ENTERING
from phalanx.schema.job_placement import TRAINER, PhaseSpec
from phalanx.testing.role_faults import Fault
from phalanx.wire.phases import Holding
from tests.roles.coordination.case import DEFER, PID, Phases, run, trainer_on_its_way

CERTAIN = [Fault.REFUSED]
UNCERTAIN = [Fault.UNSENT, Fault.UNANSWERED]
BOTH = Schedule(
    DEFER.mode,
    (PhaseSpec("both", ("rollout", "genrm")), PhaseSpec("train", (TRAINER,))),
    {"rollout": ("n:0",), "genrm": ("n:1",), TRAINER: ("n:0", "n:1")},
)


async def not_cleared(fault: Fault, match: str | None = None) -> Phases:
    """The rollout did not go, as the judge's phase was to begin."""
    p = Phases()
    await p.enter("rollout")
    p.faults.next("deactivate rollout", [fault])
    with pytest.raises(RoleOperationFailedError, match=match):
        await p.enter("genrm")
    return p


def test_every_step_says_what_undoes_it():
    assert [step.name for step in ENTERING] == [
        "begin",
        "clear",
        "take",
        "activate",
        "await",
        "publish",
        "end",
    ]
    assert all(step.compensation for step in ENTERING)


def test_begin_what_cannot_be_written_down_is_not_begun():
    async def scenario():
        p = Phases()
        await p.enter("rollout")
        p.journal.broken = 2
        log = list(p.log)
        with pytest.raises(RoleOperationFailedError, match="no space left"):
            await p.enter("genrm")
        assert (p.document.phase, p.holders, p.log) == ("rollout", {"rollout"}, log)
        await p.enter("genrm")

    run(scenario)


@pytest.mark.parametrize("fault", UNCERTAIN)
def test_d9_clear_an_uncertain_role_keeps_its_lease_and_blocks(fault):
    async def scenario():
        p = await not_cleared(fault)
        assert (p.document.phase, p.holders) == (None, {"rollout"})
        assert p.document.leases[0].holding is Holding.UNKNOWN
        assert {tenant.phase for tenant in p.tenants.values()} == {None}
        p.faults.next("find_out rollout", [Fault.UNANSWERED])
        with pytest.raises(RoleOperationFailedError, match="--holds-nothing ROLE"):
            await p.recover()
        assert p.holders == {"rollout"}
        await p.recover()
        assert (p.holders, p.document.blocked) == (set(), None)
        assert not p.tenants["rollout"].really_holds

    run(scenario)


def test_d9_clear_a_role_that_refuses_keeps_its_lease_and_what_it_holds():
    async def scenario():
        p = await not_cleared(Fault.REFUSED, "'rollout' holds memory on")
        assert p.holders == {"rollout"}
        assert p.really_resident() == ["rollout"]
        await p.recover()
        assert p.really_resident() == []

    run(scenario)


def test_d9_somebodys_word_frees_what_cannot_say():
    async def scenario():
        p = await not_cleared(Fault.UNSENT)
        p.tenants["rollout"].really_holds = False
        p.faults.always("find_out rollout", Fault.UNSENT)
        await p.recover("rollout")
        assert p.holders == set()
        await p.enter("genrm")

    run(scenario)


def test_look_again_a_replica_that_somebody_has_replaced_ends_the_uncertainty():
    async def scenario():
        p = await not_cleared(Fault.UNSENT)
        p.coordinator.look_again()
        assert p.document.blocked is not None
        p.tenants["rollout"].held = Holding.NOTHING
        p.coordinator.look_again()
        assert (p.document.blocked, p.holders) == (None, set())
        await p.enter("genrm")

    run(scenario)


def test_take_nobody_gets_a_device_of_one_who_holds_memory_without_a_lease():
    async def scenario():
        p = Phases()
        p.tenants["teacher"].held = Holding.MEMORY
        p.faults.next("deactivate teacher", [Fault.REFUSED])
        with pytest.raises(RoleOperationFailedError, match="'teacher' holds memory"):
            await p.enter("rollout")
        assert p.really_resident() == []
        assert p.holders == set()
        await p.recover()
        await p.enter("rollout")

    run(scenario)


@pytest.mark.parametrize("fault", CERTAIN)
def test_activate_what_was_activated_is_put_to_sleep_again(fault):
    async def scenario():
        p = Phases(BOTH)
        p.faults.next("activate genrm", [fault])
        with pytest.raises(RoleOperationFailedError, match="genrm"):
            await p.enter("both")
        assert p.log[-2:] == ["deactivate rollout", "deactivate rollout: done"]
        assert (p.holders, p.document.phase, p.document.blocked) == (set(), None, None)
        assert p.document.batch is None
        await p.enter("both")
        assert p.really_resident() == ["rollout", "genrm"]

    run(scenario)


@pytest.mark.parametrize("fault", UNCERTAIN)
def test_d9_activate_an_uncertain_role_keeps_its_lease(fault):
    async def scenario():
        p = Phases()
        p.faults.next("activate rollout", [fault])
        with pytest.raises(RoleOperationFailedError, match="perhaps holds memory"):
            await p.enter("rollout")
        assert p.holders == {"rollout"}
        with pytest.raises(RoleOperationRefusedError, match="blocked"):
            await p.enter("rollout")
        await p.recover()
        assert (p.holders, p.really_resident()) == (set(), [])
        await p.enter("rollout")
        assert p.really_resident() == ["rollout"]

    run(scenario)


def test_activate_what_failed_and_cannot_be_undone_keeps_its_lease():
    async def scenario():
        p = Phases(BOTH)
        p.faults.next("activate genrm", [Fault.REFUSED])
        p.faults.next("deactivate rollout", [Fault.UNANSWERED])
        with pytest.raises(RoleOperationFailedError, match="'rollout' perhaps holds"):
            await p.enter("both")
        assert p.holders == {"rollout"}
        await p.recover()
        await p.enter("both")

    run(scenario)


def test_activate_leases_that_cannot_be_written_down_are_given_up():
    async def scenario():
        p, entering = await trainer_on_its_way()
        p.journal.broken = 2
        with pytest.raises(RoleOperationFailedError, match="no space left"):
            await entering
        assert (p.holders, p.document.trainer_holding) == (set(), Holding.NOTHING)
        await p.enter("train")
        assert p.holders == {TRAINER}

    run(scenario)


def test_activate_a_trainer_that_ends_meanwhile_gets_no_lease():
    async def scenario():
        p, entering = await trainer_on_its_way()
        p.processes.end(PID)
        with pytest.raises(RoleOperationFailedError, match="trainer has ended"):
            await entering
        assert (p.holders, p.document.phase, p.document.trainer_id) == (set(), None, None)
        await p.enter("teacher")

    run(scenario)


def test_end_a_phase_whose_end_cannot_be_written_down_is_entered_all_the_same():
    async def scenario():
        p = Phases()
        entering = await p.amid("activate rollout", p.enter("rollout"))
        p.journal.broken = 2
        with pytest.raises(RoleOperationFailedError, match="no space left"):
            await entering
        assert (p.document.phase, p.holders) == ("rollout", {"rollout"})
        await p.enter("rollout")
        await p.enter("genrm")

    run(scenario)


def test_leave_blocks_as_clear_does():
    async def scenario():
        p = Phases()
        await p.enter("rollout")
        p.faults.next("deactivate rollout", [Fault.UNANSWERED])
        with pytest.raises(RoleOperationFailedError):
            await p.leave(abandon=True)
        assert p.document.blocked is not None
        assert p.document.batch == "1"
        await p.recover()
        await p.leave(abandon=True)
        await p.enter("rollout", "2")

    run(scenario)
