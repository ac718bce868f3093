"""Runs the dispatch benchmark and writes its report.

Each transport runs in a process of its own, which starts the workers that it sends to; all
transports, and the floors, take turns.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.progress import Progress

from phalanx.bench.benchmark_run import BenchmarkRun
from phalanx.bench.dispatch_goals import goals
from phalanx.bench.dispatch_systems import FLOOR, PHALANX, REPLICAS
from phalanx.bench.dispatch_workload import REPLICA_PARTS, DispatchWorkload
from phalanx.bench.replica_trials import (
    PARENT,
    WORKER,
    Beside,
    Death,
    Steps,
    calibrated,
    tiny_requests,
)
from phalanx.bench.results import Measure, Sample
from phalanx.bench.round_trips import floors, round_trips
from phalanx.bench.running_system import Placed, RunningSystem, start_system
from phalanx.bench.systems import BenchmarkedSystem
from phalanx.bench.turns import Turn, take_turns

THREADS = 1


def measure_dispatch(
    peers: Sequence[Placed], workload: DispatchWorkload, parts: Collection[str], output: Path
) -> Path:
    """Run `parts`, print the table and the goals, and return the folder with the report."""
    run = BenchmarkRun("dispatch", output)
    run.folder.mkdir(parents=True)
    with (
        tempfile.TemporaryDirectory(prefix="phalanx-", ignore_cleanup_errors=True) as scratch,
        Progress(console=run.console) as bar,
    ):
        measuring = _Measuring(workload, run.folder, Path(scratch), bar)
        if "round-trips" in parts:
            for num_workers in workload.workers:
                measuring.round_trips(peers, num_workers)
        if any(part in parts for part in REPLICA_PARTS):
            measuring.replica_trials(parts)
    return run.deliver(measuring.descriptions, measuring.measures, measuring.samples, goals=goals)


class _Measuring:
    """What was measured so far."""

    def __init__(
        self, workload: DispatchWorkload, folder: Path, scratch: Path, bar: Progress
    ) -> None:
        self._workload = workload
        self._folder = folder
        self._scratch = scratch
        self._bar = bar
        self.descriptions: dict[str, str] = {}
        self.measures: list[Measure] = []
        self.samples: list[Sample] = []

    def round_trips(self, peers: Sequence[Placed], num_workers: int) -> None:
        """All transports with so many workers each, and the floors with the first of them."""
        phases = list(round_trips(self._workload, num_workers))
        with ExitStack() as stack:
            transports = [
                self._start(stack, placed, num_workers) for placed in (_ours(PHALANX), *peers)
            ]
            turns = [Turn(phase, one.name, one.worker) for phase in phases for one in transports]
            if num_workers == self._workload.workers[0]:
                floor = self._start(stack, _ours(FLOOR), num_workers)
                turns += [Turn(phase, FLOOR.name, floor.worker) for phase in floors(self._workload)]
            self._take(turns, self._workload.repeats)

    def replica_trials(self, parts: Collection[str]) -> None:
        """Those of the trials that were asked for."""
        workload = self._workload
        with ExitStack() as stack:
            replicas = self._start(stack, _ours(REPLICAS), 2)
            if "scaling" in parts:
                floor = self._start(stack, _ours(FLOOR), 2)
                num_iterations = calibrated(replicas.worker, workload.step_s)
                turns = [
                    Turn(Steps(count, workload, num_iterations), one.name, one.worker)
                    for count in (1, 2)
                    for one in (replicas, floor)
                ]
                self._take(turns, workload.repeats)
            if "stopped" in parts:
                turns = [
                    Turn(Beside(other, workload), replicas.name, replicas.worker)
                    for other in ("busy", "stopped")
                ]
                self._take(turns, workload.beside_rounds)
            if "death" in parts:
                death = Turn(Death(workload.num_pending), replicas.name, replicas.worker)
                self._take([death], workload.num_deaths)
            if "memory" in parts:
                self.measures += [PARENT, WORKER]
                self.samples += tiny_requests(replicas.worker, workload, self._bar)

    def _start(self, stack: ExitStack, placed: Placed, num_workers: int) -> RunningSystem:
        system, _ = placed
        scratch = Path(tempfile.mkdtemp(dir=self._scratch))
        log = self._folder / f"{Path(system.worker).stem}-{num_workers}.log"
        start = {"workers": num_workers, "scratch": str(scratch)}
        running = start_system(stack, placed, THREADS, log, start)
        self.descriptions.setdefault(system.name, running.description)
        return running

    def _take(self, turns: Sequence[Turn], repeats: int) -> None:
        """Run them in turn; measures that several systems share are rows of their own once."""
        for turn in turns:
            self.measures += [each for each in turn.phase.measures if each not in self.measures]
        self.samples += take_turns(turns, repeats, self._bar)


def _ours(system: BenchmarkedSystem) -> Placed:
    return system, Path(sys.executable)
