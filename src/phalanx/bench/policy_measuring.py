"""Runs the policy benchmark and writes its report.

Every system runs in its own process on the same weights, dtype and threads, with the same noise.
They take turns, phase by phase.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import Progress

from phalanx.bench.benchmark_run import BenchmarkRun
from phalanx.bench.policy_geometry import ACTION_DIM, CAMERAS, Geometry, policy_checkpoint
from phalanx.bench.policy_goals import FULL, MASKED, goals
from phalanx.bench.policy_phases import ALONE, TOGETHER, Chunk, Several, largest_difference
from phalanx.bench.policy_systems import PHALANX
from phalanx.bench.results import Measure, Sample
from phalanx.bench.running_system import Placed, RunningSystem, start_system
from phalanx.bench.turns import Phase, Turn, take_turns

CASES = (MASKED, FULL)
MEMORY = Measure(key="memory", label="peak resident memory", unit="MiB", more_is_better=False)


@dataclass(frozen=True)
class PolicyWorkload:
    """`together`: requests that arrive together; 0: none do. `count`: chunks of each case a round."""

    geometry: Geometry
    dtype: str
    threads: int
    repeats: int
    together: int
    count: int = 1


def measure_policies(
    peers: Sequence[Placed], workload: PolicyWorkload, output: Path, cache: Path
) -> Path:
    """Run everything, print the table and the goals, and return the folder with the report.

    `cache` keeps the checkpoint for later runs.
    """
    run = BenchmarkRun("policy", output)
    run.folder.mkdir(parents=True)
    chunks: list[Phase] = [Chunk(case, workload.count) for case in CASES]
    several: list[Phase] = []
    if workload.together:
        several = [Several(MASKED, workload.together, how) for how in (ALONE, TOGETHER)]
    with Progress(console=run.console) as bar, ExitStack() as stack:
        checkpoint = policy_checkpoint(workload.geometry, cache)
        systems = [(PHALANX, Path(sys.executable)), *peers]
        running = _start(stack, systems, workload, checkpoint, run.folder)
        ours, *others = running
        differences = {
            f"actions differ from {other.name}'s by, {case.label}": format(
                largest_difference(case, ours.worker, other.worker), ".1e"
            )
            for other in others
            for case in CASES
        }
        turns = [Turn(phase, one.name, one.worker) for phase in chunks for one in running]
        turns += [Turn(phase, ours.name, ours.worker) for phase in several]
        samples = take_turns(turns, workload.repeats, bar)
        samples += [_memory(one) for one in running]
        descriptions = {one.name: one.description for one in running}
    for words, difference in differences.items():
        run.console.print(f"{words}: {difference}", highlight=False)
    return run.deliver(
        descriptions,
        (*(m for phase in (*chunks, *several) for m in phase.measures), MEMORY),
        samples,
        context={
            "model": workload.geometry.description,
            "dtype": workload.dtype,
            "threads": str(workload.threads),
            **differences,
        },
        goals=goals,
    )


def _start(
    stack: ExitStack,
    systems: Sequence[Placed],
    workload: PolicyWorkload,
    checkpoint: Path,
    folder: Path,
) -> list[RunningSystem]:
    """All systems loaded, one after another."""
    start = {
        "checkpoint": str(checkpoint.absolute()),
        "dtype": workload.dtype,
        "threads": workload.threads,
        "geometry": {**asdict(workload.geometry), "action_dim": ACTION_DIM},
        "cameras": [f"observation.images.{name}" for name in CAMERAS],
        "rows": max(1, workload.together),
    }
    return [
        start_system(stack, placed, workload.threads, folder / f"{placed[0].name}.log", start)
        for placed in systems
    ]


def _memory(one: RunningSystem) -> Sample:
    value = one.worker.peak_bytes / 2**20
    return Sample(measure=MEMORY.key, system=one.name, repeat=0, value=value)
