"""One soak: a job, its callers, what happens to it, and the memory that its processes hold."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from phalanx.clock import SystemClock
from phalanx.testing.soak.disturbances import Disturbances, checkpoint_of, watch_revisions
from phalanx.testing.soak.job import SoakError, SoakJob, soak_job
from phalanx.testing.soak.traffic import Tally, Traffic

SAMPLE_S = 1.0
MIN_ROUNDS = 2
"""One of each kind."""
MIB = 1024 * 1024


@dataclass(frozen=True)
class Sample:
    """Resident memory in MiB, `at_s` seconds after the start; of the engines, each one's mean."""

    at_s: float
    control: float
    gateway: float
    engine: float


class Soak:
    """`duration_s` is kept to whole rounds, of which there are at least `MIN_ROUNDS`."""

    def __init__(
        self, directory: Path, num_callers: int, duration_s: float, note: Callable[[str], None]
    ) -> None:
        self.samples: list[Sample] = []
        self.round_ends_s: list[float] = []
        self.faults: list[str] = []
        self.tally = Tally()
        self.num_updates = 0
        self._directory = directory
        self._num_callers = num_callers
        self._duration_s = duration_s
        self._note = note
        self._clock = SystemClock()
        self._begun_s = self._clock.monotonic_s()

    async def run(self) -> None:
        """Raises `SoakError` where an operation failed; `faults` has what answers showed."""
        self._say("starting")
        async with soak_job(self._directory) as job:
            traffic = Traffic(
                f"{job.gateway_url}/rollout", self._num_callers, checkpoint_of, self._say
            )
            self.tally = traffic.tally
            try:
                await self._disturbed(job, traffic)
            finally:
                self.faults += traffic.tally.faults
                await traffic.close()

    async def _disturbed(self, job: SoakJob, traffic: Traffic) -> None:
        disturbances = Disturbances(job, traffic, self._say)
        await traffic.learn(0)
        await disturbances.update()
        await traffic.learn(1)
        watching = [
            asyncio.create_task(watch_revisions(job)),
            asyncio.create_task(self._sample(job)),
        ]
        calling = asyncio.create_task(traffic.run())
        try:
            end_s = self._clock.monotonic_s() + self._duration_s
            while len(self.round_ends_s) < MIN_ROUNDS or self._clock.monotonic_s() < end_s:
                await disturbances.round()
                self.round_ends_s.append(self._now_s())
                self._say(f"round {disturbances.num_rounds}: {_told(traffic.tally)}")
                for task in watching:
                    if task.done():
                        task.result()
        finally:
            self.num_updates = disturbances.num_updates
            traffic.stop()
            await asyncio.gather(calling, return_exceptions=True)
            for task in watching:
                task.cancel()
            ends = await asyncio.gather(*watching, return_exceptions=True)
        for end in (*ends, calling.exception()):
            if isinstance(end, SoakError):
                raise end
        calling.result()

    async def _sample(self, job: SoakJob) -> None:
        while True:
            sizes: dict[str, list[float]] = {}
            for kind, processes in job.processes().items():
                sizes[kind] = []
                for process in processes:
                    try:
                        sizes[kind].append(process.memory_info().rss / MIB)
                    except psutil.Error:
                        continue  # it has just ended
            mean = {kind: sum(each) / max(len(each), 1) for kind, each in sizes.items()}
            self.samples.append(
                Sample(self._now_s(), mean["control"], mean["gateway"], mean["engine"])
            )
            await asyncio.sleep(SAMPLE_S)

    def _now_s(self) -> float:
        return self._clock.monotonic_s() - self._begun_s

    def _say(self, text: str) -> None:
        self._note(f"{self._now_s():7.1f} s  {text}")


def growth(soak: Soak, kind: str) -> float:
    """MiB by which `control`, `gateway` or `engine` has grown from the first round's end to the
    last's; 0 where it failed before that. Each end is the least of the samples about it.
    """
    if len(soak.round_ends_s) < MIN_ROUNDS:
        return 0.0
    first, last = soak.round_ends_s[0], soak.round_ends_s[-1]
    early = [getattr(each, kind) for each in soak.samples if first - 4 <= each.at_s <= first + 4]
    late = [getattr(each, kind) for each in soak.samples if last - 8 <= each.at_s <= last]
    return float(min(late) - min(early)) if early and late else 0.0


def report(soak: Soak, folder: Path) -> str:
    """The result in words; also written to `folder`, with the samples and a plot of them."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        _told(soak.tally),
        f"{len(soak.round_ends_s)} rounds, {soak.num_updates} updates of the weights",
        *(
            f"{kind}: {growth(soak, kind):+.1f} MiB from the first round's end to the last's"
            for kind in ("control", "gateway", "engine")
        ),
        *(f"FAULT {fault}" for fault in soak.faults[:20]),
        f"{len(soak.faults)} faults",
    ]
    text = "\n".join(lines)
    (folder / "report.txt").write_text(text + "\n", encoding="utf-8")
    rows = [[each.at_s, each.control, each.gateway, each.engine] for each in soak.samples]
    (folder / "memory.json").write_text(json.dumps(rows), encoding="utf-8")
    _plot(soak, folder / "memory.png")
    return f"{text}\nwritten to {folder}"


def _plot(soak: Soak, path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(9, 4))
    axes = figure.subplots()
    for kind in ("control", "gateway", "engine"):
        at = [each.at_s for each in soak.samples]
        axes.plot(at, [getattr(each, kind) for each in soak.samples], label=kind)
    for end_s in soak.round_ends_s:
        axes.axvline(end_s, color="0.85", zorder=0)
    axes.set_xlabel("seconds")
    axes.set_ylabel("resident memory, MiB")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=120)


def _told(tally: Tally) -> str:
    return (
        f"{tally.num_answered} answered, {tally.num_mixed} of them of two versions,"
        f" {tally.num_lost} lost to kills, {tally.num_turned_away} times turned away unstarted,"
        f" {len(tally.faults)} faults"
    )
