"""Runs the gateway benchmark and writes its report.

The load and two backends are one process on some cores, each proxy another on a core of its own;
the proxies take turns.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
from rich.progress import Progress

from phalanx.bench.benchmark_run import BenchmarkRun
from phalanx.bench.gateway_goals import goals
from phalanx.bench.gateway_phases import Balance, ProxyUnderLoad, Through
from phalanx.bench.gateway_systems import LOAD, PHALANX, Proxy
from phalanx.bench.gateway_workload import BALANCE, PARTS, GatewayWorkload
from phalanx.bench.running_system import RunningSystem, start_system
from phalanx.bench.systems import BenchmarkedSystem
from phalanx.bench.turns import Turn, take_turns

THREADS = 1


class _Backends(msgspec.Struct, frozen=True):
    ports: list[int]
    grpc_ports: list[int]


def measure_gateway(
    peers: Sequence[Proxy],
    programs: Mapping[str, str],
    workload: GatewayWorkload,
    parts: Collection[str],
    output: Path,
) -> Path:
    """Run `parts`, print the table and the goals, and return the folder with the report."""
    run = BenchmarkRun("gateway", output)
    run.folder.mkdir(parents=True)
    with (
        tempfile.TemporaryDirectory(prefix="phalanx-", ignore_cleanup_errors=True) as scratch,
        Progress(console=run.console) as bar,
        ExitStack() as stack,
    ):
        processes = _Processes(stack, run.folder, Path(scratch), workload)
        processes.add(PHALANX, "", PARTS, parts)
        for peer in peers:
            processes.add(peer.system, programs[peer.name], (*peer.traffic, BALANCE), parts)
        samples = take_turns(processes.in_turn(), workload.repeats, bar)
    measures = dict.fromkeys(m for turn in processes.in_turn() for m in turn.phase.measures)
    return run.deliver(processes.descriptions, measures, samples, goals=goals)


class _Processes:
    """The processes of one run and the turns that they take."""

    def __init__(
        self, stack: ExitStack, folder: Path, scratch: Path, workload: GatewayWorkload
    ) -> None:
        cores = sorted(os.sched_getaffinity(0))
        # With one core there is nothing to separate.
        self._proxy_cores = cores[-1:] if len(cores) > 1 else []
        self._stack = stack
        self._folder = folder
        self._scratch = scratch
        self._workload = workload
        self._turns: list[Turn] = []
        self.descriptions: dict[str, str] = {}
        self._load = self._start(LOAD, {"cores": cores[:-1] if len(cores) > 1 else []})
        self._backends = msgspec.convert(self._load.worker.ask("ports"), _Backends)

    def add(
        self,
        system: BenchmarkedSystem,
        program: str,
        able: Collection[str],
        wanted: Collection[str],
    ) -> None:
        """Start a proxy, which takes a turn in each part that is wanted and that it is able to."""
        backends = self._backends
        running = self._start(
            system,
            {
                "ports": backends.ports,
                "grpc_ports": backends.grpc_ports,
                "scratch": tempfile.mkdtemp(dir=self._scratch),
                "cores": self._proxy_cores,
                "program": program,
            },
        )
        self.descriptions[running.name] = running.description
        under_load = ProxyUnderLoad(running.worker, self._load.worker)
        for traffic in self._workload.traffic:
            if traffic.key in able and traffic.key in wanted:
                ports = backends.grpc_ports if traffic.key == "grpc" else backends.ports
                self._turns.append(Turn(Through(traffic, ports[0]), running.name, under_load))
        if BALANCE in wanted and BALANCE in able:
            self._turns.append(Turn(Balance(self._workload), running.name, under_load))

    def in_turn(self) -> list[Turn]:
        """One kind after another, each by all proxies, so that they meet the same machine."""
        keys = list(dict.fromkeys(turn.phase.measures[0].key for turn in self._turns))
        return sorted(self._turns, key=lambda turn: keys.index(turn.phase.measures[0].key))

    def _start(self, system: BenchmarkedSystem, start: Mapping[str, object]) -> RunningSystem:
        log = self._folder / f"{system.name}.log"
        placed = system, Path(sys.executable)
        return start_system(self._stack, placed, THREADS, log, start)
