"""Runs the placement benchmark and writes its report."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

import phalanx
from phalanx.bench.benchmark_run import BenchmarkRun
from phalanx.bench.results import Goal, Measure, Report, Sample
from phalanx.errors import ConfigurationError
from phalanx.roles.placement.picture import picture
from phalanx.roles.placement.planner import plan
from phalanx.roles.placement.svg import svg
from phalanx.schema.job_placement import ClusterSpec, NodeSpec, PlacementRequest
from phalanx.schema.roles import (
    DeploymentSpec,
    EngineGroupSpec,
    InferenceModelSpec,
    InferenceRoleSpec,
    PlacementMode,
    RoutingSpec,
    WorkloadType,
)

DEVICES_PER_NODE = 8
MAX_PLAN_MS = 300.0
GOAL_DEVICES = 10_000
_ROWS = 64
_RANKS = {WorkloadType.ROLLOUT: 2, WorkloadType.GENRM: 1, WorkloadType.TEACHER: 4}
_TENTHS = {WorkloadType.ROLLOUT: 5, WorkloadType.GENRM: 1, WorkloadType.TEACHER: 3}
"""Of the devices, where each role has its own; the trainer has what is left."""
_KINDS = (
    ("plan", "planning", "ms"),
    ("refuse", "refusing one device too many", "ms"),
    ("draw", "picture and SVG", "ms"),
    ("peak", "peak memory of planning", "MiB"),
)


@dataclass(frozen=True)
class PlacementWorkload:
    """Clusters of so many devices each, and rounds."""

    devices: tuple[int, ...]
    repeats: int

    def __post_init__(self) -> None:
        if min(self.devices) < 10:
            raise ConfigurationError(
                f"--devices={min(self.devices)} is too small for three roles and a trainer; give 10"
                " or more"
            )


def measures(workload: PlacementWorkload) -> tuple[Measure, ...]:
    """Each kind at each size."""
    return tuple(
        Measure(
            key=f"{key}-{size}",
            label=f"{label}, {size:,} devices",
            unit=unit,
            more_is_better=False,
            plotted=key in ("plan", "peak"),
        )
        for key, label, unit in _KINDS
        for size in workload.devices
    )


def job(mode: PlacementMode, devices: int, extra: int = 0) -> PlacementRequest:
    """Three roles and a trainer on all of them, and `extra` devices more for the trainer.

    Where they take turns, each has as many as its engines can fill.
    """
    sizes = [
        min(DEVICES_PER_NODE, devices - first) for first in range(0, devices, DEVICES_PER_NODE)
    ]
    nodes = tuple(NodeSpec(f"node-{number}", size) for number, size in enumerate(sizes))
    roles, used = [], 0
    for workload, ranks in _RANKS.items():
        if mode is PlacementMode.DEFER:
            replicas = sum(size // ranks for size in sizes)
        else:
            replicas = max(1, devices * _TENTHS[workload] // 10 // ranks)
            used += replicas * ranks
        roles.append(_role(workload, replicas, ranks))
    return PlacementRequest(mode, ClusterSpec(nodes), tuple(roles), devices - used + extra)


def _role(workload: WorkloadType, replicas: int, ranks: int) -> InferenceRoleSpec:
    group = EngineGroupSpec(num_replicas=replicas, ranks_per_replica=ranks)
    model = InferenceModelSpec(f"{workload.value}-model", "/models/any", (group,))
    return InferenceRoleSpec(workload.value, workload, DeploymentSpec(), RoutingSpec(), (model,))


def measure_placement(workload: PlacementWorkload, output: Path) -> Path:
    """Measure, print the table and the goals, and return the folder with the report."""
    run = BenchmarkRun("placement", output)
    samples: list[Sample] = []
    with Progress(console=run.console) as bar:
        task = bar.add_task("placement", total=workload.repeats * len(PlacementMode))
        for repeat in range(workload.repeats):
            for mode in PlacementMode:
                bar.update(task, description=f"{repeat + 1}/{workload.repeats} {mode.value}")
                samples += [
                    Sample(measure=key, system=mode.value, repeat=repeat, value=value)
                    for size in workload.devices
                    for key, value in _round(mode, size)
                ]
                bar.advance(task)
    return run.deliver(
        {
            PlacementMode.DECOUPLED.value: "a group of its own for each",
            PlacementMode.SPLIT.value: "slices of one group",
            PlacementMode.DEFER.value: "all devices for each of the four, by turns",
        },
        measures(workload),
        samples,
        context={
            "version": f"phalanx {phalanx.__version__}",
            "job": f"nodes of {DEVICES_PER_NODE}; engines of 2, 1 and 4 devices, and a trainer",
        },
        goals=goals,
    )


def goals(report: Report) -> tuple[Goal, ...]:
    """What was aimed at for the largest cluster, and what the report gives."""
    found = []
    for mode in PlacementMode:
        summary = report.summary(f"plan-{GOAL_DEVICES}", mode.value)
        if summary is not None:
            found.append(
                Goal(
                    aim=f"planning {GOAL_DEVICES:,} devices, {mode.value}, takes at most"
                    f" {MAX_PLAN_MS:g} ms",
                    result=f"{summary.median:.0f} ms",
                    met=summary.median <= MAX_PLAN_MS,
                )
            )
    return tuple(found)


def _round(mode: PlacementMode, devices: int) -> Iterator[tuple[str, float]]:
    asked, too_many = job(mode, devices), job(mode, devices, extra=1)
    gc.collect()
    begun = time.perf_counter()
    made = plan(asked)
    planned = time.perf_counter()
    svg(picture(made, _ROWS), mode.value)
    drawn = time.perf_counter()
    yield f"plan-{devices}", (planned - begun) * 1e3
    yield f"draw-{devices}", (drawn - planned) * 1e3
    begun = time.perf_counter()
    try:
        plan(too_many)
    except ConfigurationError:
        yield f"refuse-{devices}", (time.perf_counter() - begun) * 1e3
    tracemalloc.start()
    try:
        plan(asked)
        yield f"peak-{devices}", tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()
