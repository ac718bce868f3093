"""What the policy benchmark measures: one chunk, and several requests that arrive together."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from phalanx.bench.results import Measure
from phalanx.bench.turns import Asks

TOGETHER, ALONE = "together", "alone"


@dataclass(frozen=True)
class Case:
    """An observation: how many of the checkpoint's cameras are there, and tokens of the prompt."""

    key: str
    label: str
    num_cameras: int
    prompt_tokens: int

    def sizes(self) -> dict[str, int]:
        return {"num_cameras": self.num_cameras, "prompt_tokens": self.prompt_tokens}


class _Times(msgspec.Struct, frozen=True):
    times_s: list[float]


class _Actions(msgspec.Struct, frozen=True):
    actions: list[list[list[float]]]


class Chunk:
    """The median time of a request alone."""

    def __init__(self, case: Case, count: int) -> None:
        self._case = case
        self._count = count
        self._measure = _time(case.key, f"a chunk, {case.label}")
        self._work = Measure(
            key=f"{case.key}_cpu",
            label=f"a chunk, {case.label}, processor time",
            unit="ms",
            more_is_better=False,
            plotted=False,
        )

    @property
    def measures(self) -> tuple[Measure, ...]:
        return self._measure, self._work

    def warm_up(self, worker: Asks) -> None:
        worker.ask(ALONE, count=1, **self._case.sizes())

    def run(self, worker: Asks) -> Mapping[str, float]:
        before_s = worker.cpu_s()
        answer = worker.ask(ALONE, count=self._count, **self._case.sizes())
        cpu_s = worker.cpu_s() - before_s
        values = {self._measure.key: statistics.median(_times(answer)) * 1e3}
        if cpu_s > 0:
            values[self._work.key] = cpu_s / self._count * 1e3
        return values


class Several:
    """All of `count` requests, which arrive `how`: one after another, or together."""

    def __init__(self, case: Case, count: int, how: str) -> None:
        self._case = case
        self._count = count
        self._how = how
        words = "together" if how == TOGETHER else "one after another"
        self._measure = _time(several_key(how), f"{count} requests {words}, {case.label}")

    @property
    def measures(self) -> tuple[Measure, ...]:
        return (self._measure,)

    def warm_up(self, worker: Asks) -> None:
        count = self._count if self._how == TOGETHER else 1
        worker.ask(self._how, count=count, **self._case.sizes())

    def run(self, worker: Asks) -> Mapping[str, float]:
        answer = worker.ask(self._how, count=self._count, **self._case.sizes())
        return {self._measure.key: sum(_times(answer)) * 1e3}


def several_key(how: str) -> str:
    return f"several_{how}"


def largest_difference(case: Case, ours: Asks, theirs: Asks) -> float:
    """Between two systems' normalized actions for the same observation and noise."""
    mine, other = (
        np.array(msgspec.convert(worker.ask("actions", count=1, **case.sizes()), _Actions).actions)
        for worker in (ours, theirs)
    )
    return float(np.abs(mine - other).max())


def _times(answer: dict[str, object]) -> list[float]:
    return msgspec.convert(answer, _Times).times_s


def _time(key: str, label: str) -> Measure:
    return Measure(key=key, label=label, unit="ms", more_is_better=False)
