"""The journal: what was safe before a kill at any byte is known, and nothing else is made of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from phalanx.errors import ConfigurationError, RoleOperationFailedError
from phalanx.roles.coordination.journal import FileJournal
from phalanx.roles.coordination.record import PhaseState, Remembered
from phalanx.roles.coordination.schedule import Schedule
from phalanx.schema.job_placement import TRAINER, PhaseSpec
from phalanx.schema.roles import PlacementMode
from phalanx.testing.role_faults import Fault
from tests.roles.coordination.case import DEFER, PHASES, PID, Phases, run, until


def state(p: Phases) -> PhaseState:
    return p.coordinator._board.state


def test_d5_a_journal_cut_at_any_byte_is_one_of_its_earlier_states(tmp_path):
    path = tmp_path / "job.journal"

    async def scenario():
        p = Phases(journal=FileJournal(path))
        states = [None, Remembered(DEFER.shape, PhaseState()), FileJournal(path).read()]
        write = p.journal.write

        def watched(*arguments, **how):
            write(*arguments, **how)
            states.append(FileJournal(path).read())

        p.journal.write = watched
        p.attach()
        await p.enter("rollout", "1", "first")
        await p.enter("genrm", "1", "last")
        content = path.read_bytes()
        assert content.count(b"\n") == len(states) - 1 == 9
        for size in range(len(content) + 1):
            found = p.journal.parse(content[:size])
            assert found == states[content[:size].count(b"\n")], size

    run(scenario)


def test_d5_a_job_goes_on_from_a_journal_that_was_cut_at_any_line(tmp_path):
    path = tmp_path / "job.journal"

    async def scenario():
        p = Phases(journal=FileJournal(path))
        p.attach()
        await p.up_to("train")
        await p.coordinator.close()
        lines = path.read_bytes().splitlines(keepends=True)
        for count in range(len(lines) + 1):
            path.write_bytes(b"".join(lines[:count]) + b"{")
            q = Phases(journal=FileJournal(path))
            q.processes = p.processes
            await q.restart()
            if q.holders:
                assert count == len(lines), "it was not answered before its last line"
                q.release()
            known, reached = q.document.batch, state(q).reached
            if known is None:
                await q.enter("rollout", "1", "new")
            elif PHASES[reached].name == "train":
                await q.enter("rollout", "2", "new")
            else:
                await q.enter(PHASES[reached].name, "1", "new")
            await q.coordinator.close()

    run(scenario)


def test_a_line_that_was_half_written_is_overwritten(tmp_path):
    path = tmp_path / "job.journal"

    async def scenario():
        p = Phases(journal=FileJournal(path))
        await p.enter("rollout")
        await p.coordinator.close()
        for torn in (b'{"line":"state","st', b"\0" * 40, b"\xff\n"):
            path.write_bytes(path.read_bytes() + torn)
            p = Phases(journal=FileJournal(path))
            assert p.document.batch == "1"
            await p.enter("rollout")
            await p.coordinator.close()

    run(scenario)


def test_a_damaged_journal_is_refused_with_the_way_out(tmp_path):
    path = tmp_path / "job.journal"

    async def scenario():
        p = Phases(journal=FileJournal(path))
        await p.enter("rollout")
        await p.coordinator.close()
        whole = path.read_bytes().splitlines(keepends=True)
        for damaged in (
            [whole[0], b"nonsense\n", *whole[1:]],
            whole[1:],
            [whole[0], *whole],
            [whole[0].replace(b'"format":1', b'"format":9'), *whole[1:]],
        ):
            path.write_bytes(b"".join(damaged))
            with pytest.raises(ConfigurationError, match="is damaged.*delete the file"):
                Phases(journal=FileJournal(path))
        path.unlink()
        path.mkdir()
        with pytest.raises(ConfigurationError, match="cannot read the journal"):
            Phases(journal=FileJournal(path))

    run(scenario)


def test_a_journal_that_cannot_be_written_is_told(tmp_path):
    async def scenario():
        with pytest.raises(RoleOperationFailedError, match="cannot write the journal"):
            Phases(journal=FileJournal(tmp_path / "nowhere" / "job.journal"))

    run(scenario)


def test_the_journal_does_not_grow_without_end(tmp_path):
    path = tmp_path / "job.journal"

    async def scenario():
        p = Phases(Schedule(PlacementMode.SPLIT, PHASES), FileJournal(path, max_lines=50))
        for number in range(100):
            await p.enter("rollout", operation_id=f"op {number % 10}")
        assert path.read_bytes().count(b"\n") <= 60
        await p.coordinator.close()
        again = Phases(Schedule(PlacementMode.SPLIT, PHASES), FileJournal(path))
        assert (await again.enter("rollout", operation_id="op 9")).batch == "1"

    run(scenario)


@pytest.mark.parametrize(
    "step",
    ["deactivate rollout", "activate genrm", "find_out rollout"],
)
def test_d9_a_restart_at_any_step_begins_without_a_phase_and_goes_on(step):
    async def scenario():
        p = Phases()
        await p.enter("rollout")
        if step == "find_out rollout":
            p.faults.next("deactivate rollout", [Fault.UNANSWERED])
            with pytest.raises(RoleOperationFailedError):
                await p.enter("genrm")
            p.faults.next(step, [Fault.HANG])
            doing = asyncio.create_task(p.recover())
        else:
            p.faults.next(step, [Fault.HANG])
            doing = asyncio.create_task(p.enter("genrm"))
        await until(p.log, step)
        number = p.document.number
        await p.restart()
        await asyncio.gather(doing, return_exceptions=True)
        document = p.document
        assert document.number > number
        assert (document.phase, document.batch, document.blocked) == (None, "1", None)
        assert p.holders == set()
        await p.enter("genrm")
        assert p.really_resident() == ["genrm"]

    run(scenario)


def changed(**fields) -> Schedule:
    return Schedule(
        fields.get("mode", DEFER.mode),
        fields.get("phases", DEFER.phases),
        fields.get("bundles", DEFER.bundles),
    )


SHORTER = (PhaseSpec("rollout", ("rollout",)), PhaseSpec("train", (TRAINER,)))
FEWER = {"rollout": ("n0:0",), TRAINER: ("n0:0",)}


def test_a_file_with_other_phases_is_refused_in_the_middle_of_a_batch_and_taken_after_it():
    async def scenario():
        p = Phases()
        p.attach()
        await p.up_to("teacher")
        p.schedule = changed(phases=SHORTER, bundles=FEWER)
        with pytest.raises(ConfigurationError) as refused:
            await p.restart()
        words = str(refused.value)
        assert "batch '1' is in phase 'teacher' of rollout, genrm, teacher, train" in words
        assert "the phases rollout, train now" in words
        assert "delete the journal" in words
        p.schedule = DEFER
        p.begin()
        await p.enter("train")
        p.release()
        p.schedule = changed(phases=SHORTER, bundles=FEWER)
        await p.restart()
        assert p.document.batch is None
        await p.enter("rollout", "2")

    run(scenario)


def test_a_file_with_other_devices_of_the_trainer_is_refused_while_it_holds_them():
    async def scenario():
        p = Phases()
        p.attach()
        await p.up_to("train")
        p.schedule = changed(bundles={**DEFER.bundles, TRAINER: ("n0:1",)})
        with pytest.raises(ConfigurationError, match="'t' holds n0:0, n0:1.*are n0:1 now"):
            await p.restart()
        p.schedule = DEFER
        p.begin()
        p.processes.end(PID)
        p.schedule = changed(bundles={**DEFER.bundles, TRAINER: ("n0:1",)})
        await p.restart()
        assert p.holders == set()

    run(scenario)


def test_devices_of_roles_may_change_in_the_middle_of_a_batch():
    async def scenario():
        p = Phases()
        await p.enter("rollout")
        p.schedule = changed(bundles={**DEFER.bundles, "genrm": ("n0:1",)})
        await p.restart()
        await p.enter("genrm")

    run(scenario)


def test_the_journal_is_for_its_owners_eyes_alone(tmp_path: Path):
    path = tmp_path / "job.journal"

    async def scenario():
        p = Phases(journal=FileJournal(path))
        await p.enter("rollout")
        assert path.stat().st_mode & 0o777 == 0o600

    run(scenario)
