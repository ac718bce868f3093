"""Runs the benchmark of Cosmos3 and writes its report.

Each case is run by itself: every system in its own process, on the same weights, dtype and threads,
with the same tokens and noise. What they answer is compared first; then they take turns.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

from phalanx.bench.benchmark_run import BenchmarkRun
from phalanx.bench.cosmos3_cases import Case, text_share
from phalanx.bench.cosmos3_geometry import Geometry, cosmos3_checkpoint
from phalanx.bench.cosmos3_goals import goals
from phalanx.bench.cosmos3_phases import Requests, compared
from phalanx.bench.cosmos3_systems import PHALANX, TWO_RANKS
from phalanx.bench.results import Measure, Sample
from phalanx.bench.running_system import Placed, RunningSystem, start_system
from phalanx.bench.turns import Turn, take_turns


@dataclass(frozen=True)
class Cosmos3Workload:
    """`two_ranks`: also measure two processes that share the branches of guidance."""

    geometry: Geometry
    cases: tuple[Case, ...]
    dtype: str
    threads: int
    repeats: int
    two_ranks: bool


def measure_cosmos3(
    peers: Sequence[Placed], workload: Cosmos3Workload, output: Path, cache: Path
) -> Path:
    """Run everything, print the table and the goals, and return the folder with the report.

    `cache` keeps the checkpoint for later runs.
    """
    run = BenchmarkRun("cosmos3", output)
    run.folder.mkdir(parents=True)
    python = Path(sys.executable)
    systems: list[Placed] = [(PHALANX, python), *peers]
    if workload.two_ranks:
        systems.append((TWO_RANKS, python))
    descriptions: dict[str, str] = {}
    differences: dict[str, str] = {}
    samples: list[Sample] = []
    measures: list[Measure] = []
    run.console.print(f"weights of {workload.geometry.description}", highlight=False)
    checkpoint = cosmos3_checkpoint(workload.geometry, workload.dtype, cache)
    for case in workload.cases:
        phase = Requests(case)
        with Progress(console=run.console) as bar, ExitStack() as stack:
            loading = bar.add_task(f"loading for {case.label}", total=len(systems))
            running = []
            for placed in systems:
                log = run.folder / f"{case.key}-{placed[0].name}.log"
                running.append(_start(stack, placed, workload, checkpoint, case, log))
                bar.advance(loading)
            found = compared(case, workload.dtype, running)
            differences |= found
            turns = [Turn(phase, one.name, one.worker) for one in running]
            samples += take_turns(turns, workload.repeats, bar)
            memory = memory_of(case)
            samples += [_memory(memory, one) for one in running]
            measures += [*phase.measures, memory]
            descriptions |= {one.name: one.description for one in running}
        for words, difference in found.items():
            run.console.print(f"{words}: {difference}", highlight=False)
    shares = [f"{case.label} {text_share(workload.geometry, case):.0%}" for case in workload.cases]
    return run.deliver(
        descriptions,
        measures,
        samples,
        context={
            "model": workload.geometry.description,
            "dtype": workload.dtype,
            "threads of a process": str(workload.threads),
            "part of a step that reads its prompts anew": ", ".join(shares),
            **differences,
        },
        goals=goals,
    )


def start_message(
    checkpoint: Path, case: Case, dtype: str, threads: int, device: str = "cpu", num_ranks: int = 1
) -> dict[str, object]:
    """What a system is told to load."""
    config = json.loads((checkpoint / "transformer" / "config.json").read_text())
    return {
        "checkpoint": str(checkpoint.absolute()),
        "dtype": dtype,
        "device": device,
        "threads": threads,
        "num_ranks": num_ranks,
        "channels": config["latent_channel"],
        "action_dim": config["action_dim"],
        "vocab_size": config["vocab_size"],
        "policy": bool(case.action_rows),
    }


def memory_of(case: Case) -> Measure:
    return Measure(
        key=f"{case.key}_memory",
        label=f"{case.label}, peak resident memory",
        unit="MiB",
        more_is_better=False,
    )


def _start(
    stack: ExitStack,
    placed: Placed,
    workload: Cosmos3Workload,
    checkpoint: Path,
    case: Case,
    log: Path,
) -> RunningSystem:
    num_ranks = 2 if placed[0] is TWO_RANKS else 1
    message = start_message(checkpoint, case, workload.dtype, workload.threads, num_ranks=num_ranks)
    return start_system(stack, placed, workload.threads, log, message)


def _memory(measure: Measure, one: RunningSystem) -> Sample:
    value = one.worker.peak_bytes / 2**20
    return Sample(measure=measure.key, system=one.name, repeat=0, value=value)
