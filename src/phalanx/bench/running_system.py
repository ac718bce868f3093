"""A system under measurement that has been started and has loaded what it was told to."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from phalanx.bench.systems import WORKERS, BenchmarkedSystem, environment
from phalanx.bench.worker_process import WorkerProcess

Placed = tuple[BenchmarkedSystem, Path]
"""A system and the interpreter that runs it."""


@dataclass(frozen=True)
class RunningSystem:
    """`description` is what the system says of itself."""

    system: BenchmarkedSystem
    worker: WorkerProcess
    description: str

    @property
    def name(self) -> str:
        return self.system.name


def start_system(
    stack: ExitStack, placed: Placed, threads: int, log: Path, start: Mapping[str, object]
) -> RunningSystem:
    """Start a system's process, which ends with `stack`, and let it load what `start` says."""
    system, python = placed
    command = [str(python), str(WORKERS / system.worker)]
    variables = environment(system, python, threads)
    worker = stack.enter_context(WorkerProcess(system.name, command, variables, log))
    ready = worker.ask("start", **start)
    return RunningSystem(system, worker, str(ready["description"]))
