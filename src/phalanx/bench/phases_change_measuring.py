"""Runs the benchmark of changes of phase and writes its report."""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

import phalanx
from phalanx.bench.benchmark_run import BenchmarkRun
from phalanx.bench.phases_change_job import turns_job
from phalanx.bench.results import Goal, Measure, Report, Sample

OURS = "phalanx"
MAX_OVERHEAD_MS = 100.0


@dataclass(frozen=True)
class ChangeWorkload:
    """`num_changes` in each of `repeats`, of a job of `num_roles`, whose engines take `load_s` to
    give memory back, and as long to take it.
    """

    num_roles: int
    num_replicas: int
    load_s: float
    num_changes: int
    repeats: int


def _ms(key: str, label: str) -> Measure:
    return Measure(key=key, label=label, unit="ms", more_is_better=False)


CHANGE = _ms("change", "a change of phase, from asking to the answer")
ENGINES = _ms("engines", "of that, the engines' own time")
OVERHEAD = _ms("overhead", "beyond it")
SLOWEST = _ms("slowest", "beyond it, the slowest of a round")
MEASURES = (CHANGE, ENGINES, OVERHEAD, SLOWEST)


def measure_changes(workload: ChangeWorkload, output: Path) -> Path:
    """Measure, print the table and the goal, and return the folder with the report."""
    run = BenchmarkRun("phases", output)
    run.folder.mkdir(parents=True)
    with Progress(console=run.console) as bar, asyncio.Runner() as runner:
        samples = runner.run(_measured(workload, run.folder, bar))
    return run.deliver(
        {OURS: f"phalanx {phalanx.__version__}, asked over HTTP, each role followed"},
        MEASURES,
        samples,
        context={
            "job": f"{workload.num_roles} roles of {workload.num_replicas} replicas, half of which"
            " make way for the other half",
            "engines": f"{workload.load_s * 1e3:g} ms to give memory back, and to take it",
            "journal": "on the disk of the results, each line synced",
        },
        goals=lambda report: goals(report, workload.num_roles),
    )


def goals(report: Report, num_roles: int) -> tuple[Goal, ...]:
    """What was aimed at, and what the report gives."""
    summary = report.summary(OVERHEAD.key, OURS)
    if summary is None:
        return ()
    return (
        Goal(
            aim=f"a change of phase of {num_roles} roles takes at most {MAX_OVERHEAD_MS:g} ms beyond"
            " the engines' own time",
            result=f"{summary.median:.1f} ms",
            met=summary.median <= MAX_OVERHEAD_MS,
        ),
    )


async def _measured(workload: ChangeWorkload, folder: Path, bar: Progress) -> list[Sample]:
    samples = []
    task = bar.add_task("starting", total=workload.repeats * workload.num_changes)
    async with turns_job(workload.num_roles, workload.num_replicas, workload.load_s, folder) as job:
        for _ in range(3):  # both phases have started by then, and an engine starts but once
            await job.change()
        for repeat in range(workload.repeats):
            bar.update(task, description=f"{repeat + 1}/{workload.repeats}")
            took = []
            for _ in range(workload.num_changes):
                took.append(await job.change())
                bar.advance(task)
            beyond = [whole_s - own_s for whole_s, own_s in took]
            values = {
                CHANGE.key: statistics.median(whole_s for whole_s, _ in took),
                ENGINES.key: statistics.median(own_s for _, own_s in took),
                OVERHEAD.key: statistics.median(beyond),
                SLOWEST.key: max(beyond),
            }
            samples += [
                Sample(measure=key, system=OURS, repeat=repeat, value=value * 1e3)
                for key, value in values.items()
            ]
    return samples
