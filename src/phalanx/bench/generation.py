"""Runs the generation benchmark and writes its report.

Every system runs in its own process on the same weights, dtype, threads, prompts and KV capacity.
They take turns, phase by phase.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import Progress

from phalanx import settings
from phalanx.bench.benchmark_run import BenchmarkRun
from phalanx.bench.peer_checkpoint import separate_checkpoint
from phalanx.bench.phases import Generate, Text, phases_of
from phalanx.bench.results import Measure, Sample
from phalanx.bench.running_system import Placed, RunningSystem, start_system
from phalanx.bench.turns import Phase, Turn, take_turns
from phalanx.bench.workload import Workload

MEMORY = Measure(key="memory", label="peak resident memory", unit="MiB", more_is_better=False)


@dataclass(frozen=True)
class Setting:
    """What all systems are given alike."""

    model: Path
    dtype: str
    threads: int
    kv_tokens: int
    max_length: int
    max_concurrency: int


def measure(
    systems: Sequence[Placed], setting: Setting, workload: Workload, repeats: int, output: Path
) -> Path:
    """Run everything, print the table, and return the folder under `output` with the report."""
    run = BenchmarkRun("generate", output)
    phases = phases_of(workload, Text(setting.model))
    run.folder.mkdir(parents=True)
    with Progress(console=run.console) as bar, _running(systems, setting, run.folder) as running:
        samples = _measure(running, phases, repeats, bar)
        descriptions = {one.name: one.description for one in running}
    return run.deliver(
        descriptions,
        (*(m for phase in phases for m in phase.measures), MEMORY),
        samples,
        context={k: str(v) for k, v in asdict(setting).items()},
    )


@contextmanager
def _running(
    systems: Sequence[Placed], setting: Setting, folder: Path
) -> Iterator[list[RunningSystem]]:
    """All systems loaded, one after another; ended together, whatever happens."""
    with ExitStack() as stack:
        running = []
        for system, python in systems:
            model = setting.model
            if not system.fused:
                model = separate_checkpoint(model, setting.dtype, settings.cache_dir())
            start = {
                **asdict(setting),
                "model": str(model.absolute()),
                "options": dict(system.options),
            }
            log = folder / f"{system.name}.log"
            running.append(start_system(stack, (system, python), setting.threads, log, start))
        yield running


def _measure(
    running: Sequence[RunningSystem], phases: Sequence[Phase], repeats: int, bar: Progress
) -> list[Sample]:
    largest = phases[0]
    for phase in phases:
        if isinstance(phase, Generate) and isinstance(largest, Generate):
            largest = max(largest, phase, key=lambda p: p.concurrency)
    turns = [
        Turn(phase, one.name, one.worker)
        for phase in phases
        for one in running
        if phase is largest or not one.system.only_batched
    ]
    samples = take_turns(turns, repeats, bar)
    for one in running:
        peak = one.worker.peak_bytes / 2**20
        samples.append(Sample(measure=MEMORY.key, system=one.name, repeat=0, value=peak))
    return samples
