"""Measures the step engine's and the loop's own time a step, and where it goes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.progress import Progress

import phalanx
from phalanx.bench.benchmark_run import BenchmarkRun
from phalanx.bench.idle_model import PROMPT_TOKENS, IdleRequest, idle_loop
from phalanx.bench.results import Goal, Measure, Report, Sample
from phalanx.device.stage_times import StageTimes
from phalanx.loop.step_loop import StepLoop

WARM_UP_STEPS = 20
OURS = "phalanx"
AHEAD = "phalanx, looking ahead"
FIXED_US, REQUEST_US = 150, 8
FIRST_FIXED_US, FIRST_REQUEST_US = 200, 12
SHARE_OF_DECODE = 0.04
STAGES = ("declare", "admit", "plan", "preprocess", "commit", "collect", "to_host")
REST = "rest"
"""What is in no stage of the step: the loop, the scheduler, the batch's and the rows' own code."""


def own_key(rows: int) -> str:
    return f"own_{rows}"


def stage_key(stage: str, rows: int) -> str:
    return f"{stage}_{rows}"


SHARE = Measure(
    key="decode_share",
    label="own share of a decode step of the language model, 1 row",
    unit="%",
    more_is_better=False,
)


def measure_steps(
    rows: Sequence[int], steps: int, repeats: int, model: Path | None, output: Path
) -> Path:
    """Measure, print the table and the goals, and return the folder with the report.

    `rows` are the sizes of the batch; `model` is a checkpoint for the share of a decode step (None:
    that is left out).
    """
    torch.set_num_threads(1)
    run = BenchmarkRun("step", output)
    samples: list[Sample] = []
    with Progress(console=run.console) as bar:
        task = bar.add_task("steps", total=repeats * len(rows) + (model is not None))
        for repeat in range(repeats):
            for count in rows:
                bar.update(task, description=f"{repeat + 1}/{repeats} {count} rows")
                samples += _samples(count, steps, repeat)
                samples.append(_ahead_sample(count, steps, repeat))
                bar.advance(task)
        if model is not None:
            from phalanx.bench.decode_share import decode_shares

            bar.update(task, description=f"decode steps of {model.name}")
            samples += [
                Sample(measure=SHARE.key, system=OURS, repeat=repeat, value=100 * share)
                for repeat, share in enumerate(decode_shares(model, repeats))
            ]
            bar.advance(task)
    return run.deliver(
        {
            OURS: f"phalanx {phalanx.__version__}, torch {torch.__version__}, 1 thread",
            AHEAD: "the same, the next step prepared and planned while one is computed",
        },
        _measures(rows, with_share=model is not None),
        samples,
        goals=lambda report: goals(report, rows),
    )


def _samples(rows: int, steps: int, repeat: int) -> Iterator[Sample]:
    """One round: the whole time without any clock inside, then the stages with one."""
    whole_s = _seconds(_running(rows, steps, None), steps)
    times = StageTimes()
    loop = _running(rows, steps, times)
    before = times.seconds()
    _seconds(loop, steps)
    stage_s = {name: value - before[name] for name, value in times.seconds().items()}
    forward_s = stage_s["step.forward"]

    def sample(key: str, seconds: float) -> Sample:
        return Sample(measure=key, system=OURS, repeat=repeat, value=seconds / steps * 1e6)

    own_s = whole_s - forward_s
    yield sample(own_key(rows), own_s)
    for stage in STAGES:
        yield sample(stage_key(stage, rows), stage_s[f"step.{stage}"])
    staged = {f"step.{stage}" for stage in STAGES}
    rest_s = sum(value for name, value in stage_s.items() if name not in staged) - forward_s
    yield sample(stage_key(REST, rows), rest_s)


def _ahead_sample(rows: int, steps: int, repeat: int) -> Sample:
    """The whole time of a step, forward included: there is no telling it apart here."""
    loop = _running(rows, steps, None, ahead=True)
    seconds = _seconds(loop, steps)
    loop.close()
    return Sample(measure=own_key(rows), system=AHEAD, repeat=repeat, value=seconds / steps * 1e6)


def _running(rows: int, steps: int, times: StageTimes | None, *, ahead: bool = False) -> StepLoop:
    """A loop whose requests are all in their decoding, warm."""
    count = steps + WARM_UP_STEPS + 2
    loop = idle_loop(rows, PROMPT_TOKENS + count, times, ahead=ahead)
    for index in range(rows):
        loop.start(str(index), IdleRequest(count))
    while loop.num_waiting:
        loop.tick()
    for _ in range(WARM_UP_STEPS):
        loop.tick()
    return loop


def _seconds(loop: StepLoop, steps: int) -> float:
    began_s = time.perf_counter()
    for _ in range(steps):
        loop.tick()
    return time.perf_counter() - began_s


def _measures(rows: Sequence[int], *, with_share: bool) -> Iterator[Measure]:
    for count in rows:
        label = f"own time of a step, {count} rows"
        yield Measure(key=own_key(count), label=label, unit="us", more_is_better=False)
    for count in rows:
        for stage in (*STAGES, REST):
            yield Measure(
                key=stage_key(stage, count),
                label=f"{stage}, {count} rows",
                unit="us",
                more_is_better=False,
                plotted=False,
            )
    if with_share:
        yield SHARE


def goals(report: Report, rows: Sequence[int]) -> Iterator[Goal]:
    """What was aimed at for batches of these sizes, and what the report gives."""
    for fixed, each in ((FIXED_US, REQUEST_US), (FIRST_FIXED_US, FIRST_REQUEST_US)):
        for system in (OURS, AHEAD):
            found = [(count, report.summary(own_key(count), system)) for count in rows]
            medians = [(count, summary.median) for count, summary in found if summary is not None]
            if not medians:
                continue
            limits = {count: fixed + each * count for count in rows}
            shown = [f"{median:.0f} of {limits[count]} us at {count}" for count, median in medians]
            yield Goal(
                aim=f"own time of a step at most {fixed} us and {each} us a row, {system}",
                result=", ".join(shown),
                met=all(median <= limits[count] for count, median in medians),
            )
    share = report.summary(SHARE.key, OURS)
    if share is not None:
        yield Goal(
            aim=f"own share of a decode step at 1 row at most {SHARE_OF_DECODE:.0%}",
            result=f"{share.median:.1f} %",
            met=share.median <= 100 * SHARE_OF_DECODE,
        )
