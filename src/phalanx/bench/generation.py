"""Runs the generation benchmark and writes its report.

Every system runs in its own process on the same weights, dtype, threads, prompts and KV capacity.
In each round each phase is run by all systems one after another (A B A B), so that what else the
machine does meets all of them.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from phalanx import settings
from phalanx.bench.peer_checkpoint import separate_checkpoint
from phalanx.bench.phases import Generate, Phase, Text, phases_of
from phalanx.bench.report_files import print_table, write_report
from phalanx.bench.results import Measure, Report, Sample
from phalanx.bench.systems import WORKERS, BenchmarkedSystem, environment
from phalanx.bench.worker_process import WorkerProcess
from phalanx.bench.workload import Workload

MEMORY = Measure(key="memory", label="peak resident memory", unit="MiB", more_is_better=False)
Placed = tuple[BenchmarkedSystem, Path]
"""A system and the interpreter that runs it."""


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
    console = Console()
    phases = phases_of(workload, Text(setting.model))
    started = datetime.now(UTC)
    folder = output / f"generate-{started:%Y%m%d-%H%M%S}"
    folder.mkdir(parents=True)
    with Progress(console=console) as bar, _running(systems, setting, folder) as running:
        samples = _measure(running, phases, repeats, bar)
        descriptions = {one.system.name: one.description for one in running}
    report = Report(
        name="generate",
        started=f"{started:%Y-%m-%d %H:%M} UTC",
        context={"machine": _machine(), **{k: str(v) for k, v in asdict(setting).items()}},
        systems=descriptions,
        measures=(*(m for phase in phases for m in phase.measures), MEMORY),
        samples=tuple(samples),
    )
    write_report(report, folder)
    print_table(report, console)
    console.print(f"written to {folder}: report.md, report.png, report.json")
    return folder


@dataclass(frozen=True)
class _Running:
    system: BenchmarkedSystem
    worker: WorkerProcess
    description: str


@contextmanager
def _running(systems: Sequence[Placed], setting: Setting, folder: Path) -> Iterator[list[_Running]]:
    """All systems loaded, one after another; ended together, whatever happens."""
    with ExitStack() as stack:
        running = []
        for system, python in systems:
            command = [str(python), str(WORKERS / system.worker)]
            variables = environment(system, python, setting.threads)
            log = folder / f"{system.name}.log"
            worker = stack.enter_context(WorkerProcess(system.name, command, variables, log))
            model = setting.model
            if not system.fused:
                model = separate_checkpoint(model, setting.dtype, settings.cache_dir())
            start = {**asdict(setting), "model": str(model.absolute())}
            ready = worker.ask("start", **start, options=dict(system.options))
            running.append(_Running(system, worker, str(ready["description"])))
        yield running


def _measure(
    running: Sequence[_Running], phases: Sequence[Phase], repeats: int, bar: Progress
) -> list[Sample]:
    largest = phases[0]
    for phase in phases:
        if isinstance(phase, Generate) and isinstance(largest, Generate):
            largest = max(largest, phase, key=lambda p: p.concurrency)
    turns = [
        (phase, one)
        for phase in phases
        for one in running
        if phase is largest or not one.system.only_batched
    ]
    samples = []
    task = bar.add_task("warming up", total=(repeats + 1) * len(turns))
    for phase, one in turns:
        phase.warm_up(one.worker)
        bar.advance(task)
    for repeat in range(repeats):
        for phase, one in turns:
            label = phase.measures[0].label
            bar.update(task, description=f"{repeat + 1}/{repeats} {label}: {one.system.name}")
            for key, value in phase.run(one.worker).items():
                samples.append(
                    Sample(measure=key, system=one.system.name, repeat=repeat, value=value)
                )
            bar.advance(task)
    for one in running:
        peak = one.worker.peak_bytes / 2**20
        samples.append(Sample(measure=MEMORY.key, system=one.system.name, repeat=0, value=peak))
    return samples


def _machine() -> str:
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return model
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else model
