"""A step of the published Nano as a policy on a CUDA device, as a share of what the device multiplies.

The time of a step is that of long requests less that of short ones, by the steps that they differ in:
so nothing of reading, copying and answering is in it.
"""

from __future__ import annotations

import statistics
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from rich.progress import Progress

from phalanx.bench.benchmark_run import BenchmarkRun
from phalanx.bench.cosmos3_cases import ON_DEVICE, Case, step_flops
from phalanx.bench.cosmos3_geometry import Geometry, cosmos3_checkpoint
from phalanx.bench.cosmos3_measuring import start_message
from phalanx.bench.cosmos3_systems import PHALANX
from phalanx.bench.results import Measure, Sample
from phalanx.bench.running_system import start_system
from phalanx.bench.worker_process import WorkerProcess

DTYPE = "bfloat16"
FEW, MANY = 2, 10
STEP = Measure(key="step", label="a guided step", unit="ms", more_is_better=False)
RATE = Measure(key="rate", label="matrix rate of the device", unit="TFLOP/s")
SHARE = Measure(key="share", label="of the matrix rate", unit="%")


@dataclass(frozen=True)
class DeviceWorkload:
    """`device` as the engine names it."""

    geometry: Geometry
    case: Case
    device: str
    repeats: int


def on_device(device: str, repeats: int) -> DeviceWorkload:
    """What is published: Nano as a policy."""
    return DeviceWorkload(Geometry.nano(), ON_DEVICE, device, repeats)


def measure_device(workload: DeviceWorkload, output: Path, cache: Path) -> Path:
    """Run it, print the table, and return the folder with the report."""
    run = BenchmarkRun("cosmos3-device", output)
    run.folder.mkdir(parents=True)
    case, flops = workload.case, step_flops(workload.geometry, workload.case)
    run.console.print(f"weights of {workload.geometry.description}", highlight=False)
    checkpoint = cosmos3_checkpoint(workload.geometry, DTYPE, cache, workload.device)
    message = start_message(checkpoint, case, DTYPE, 1, workload.device)
    samples: list[Sample] = []
    with Progress(console=run.console) as bar, ExitStack() as stack:
        task = bar.add_task(f"loading for {case.label}", total=workload.repeats + 1)
        log = run.folder / "phalanx.log"
        one = start_system(stack, (PHALANX, Path(sys.executable)), 1, log, message)
        for repeat in range(workload.repeats + 1):
            found = _measured(one.worker, case, flops)
            if repeat:  # the first warms up
                samples += [_sample(key, repeat, value) for key, value in found.items()]
            bar.update(task, advance=1, description=f"{repeat}/{workload.repeats} {case.label}")
    return run.deliver(
        {one.name: one.description},
        (STEP, RATE, SHARE),
        samples,
        context={
            "model": workload.geometry.description,
            "dtype": DTYPE,
            "device": workload.device,
            "request": f"{case.label}, {case.num_tokens} tokens in each of two branches",
            "operations of a step": f"{flops / 1e12:.1f} TFLOP",
        },
    )


class _Run(msgspec.Struct, frozen=True):
    elapsed_s: float


class _Rate(msgspec.Struct, frozen=True):
    flops_per_s: float


def _measured(worker: WorkerProcess, case: Case, flops: int) -> dict[str, float]:
    few_s, many_s = (_elapsed_s(worker, replace(case, num_steps=steps)) for steps in (FEW, MANY))
    step_s = (many_s - few_s) / (MANY - FEW)
    rate = msgspec.convert(worker.ask("rate"), _Rate).flops_per_s
    share = 100 * flops / step_s / rate
    return {STEP.key: step_s * 1e3, RATE.key: rate / 1e12, SHARE.key: share}


def _elapsed_s(worker: WorkerProcess, case: Case) -> float:
    answers = (worker.ask("run", case=case.message(), seed=0) for _ in range(3))
    return statistics.median(msgspec.convert(each, _Run).elapsed_s for each in answers)


def _sample(key: str, repeat: int, value: float) -> Sample:
    return Sample(measure=key, system=PHALANX.name, repeat=repeat, value=value)
