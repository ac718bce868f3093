"""The benchmark of changes of phase: it goes through phases for real, and reads its report right."""

from __future__ import annotations

import asyncio

import pytest

from phalanx.bench.phases_change_job import turns_job
from phalanx.bench.phases_change_measuring import (
    OURS,
    OVERHEAD,
    ChangeWorkload,
    goals,
    measure_changes,
)
from phalanx.bench.results import Report, Sample


def test_a_change_tells_what_was_the_engines_own(tmp_path):
    async def scenario():
        async with turns_job(4, 2, 0.01, tmp_path) as job:
            for _ in range(3):
                await job.change()
            whole_s, own_s = await job.change()
            assert 0.02 <= own_s < whole_s

    asyncio.run(scenario())


@pytest.mark.parametrize(("overhead_ms", "met"), [(100.0, True), (100.1, False)])
def test_the_goal_is_a_tenth_of_a_second(overhead_ms, met):
    sample = Sample(measure=OVERHEAD.key, system=OURS, repeat=0, value=overhead_ms)
    report = Report(
        name="phases", started="", context={}, systems={}, measures=(OVERHEAD,), samples=(sample,)
    )
    (goal,) = goals(report, 10)
    assert goal.met is met
    assert "10 roles" in goal.aim


def test_a_report_is_written(tmp_path):
    folder = measure_changes(ChangeWorkload(2, 1, 0.0, 1, 1), tmp_path)
    assert "beyond it" in (folder / "report.md").read_text()
    assert (folder / "job.journal").exists()
