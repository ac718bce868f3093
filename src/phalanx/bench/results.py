"""What a benchmark measured: repeated values of each measure and system, medians and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """One row: what was measured, its unit, whether more is better, whether the plot shows it."""

    key: str
    label: str
    unit: str
    more_is_better: bool = True
    plotted: bool = True


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One measured value; `repeat` counts rounds, in which the systems took turns."""

    measure: str
    system: str
    repeat: int
    value: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    median: float
    low: float
    high: float
    count: int


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """What was aimed at, in words, what this run gave, and whether that meets it."""

    aim: str
    result: str
    met: bool


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of one run; `context` says on what machine, with which versions and sizes."""

    name: str
    started: str
    context: dict[str, str]
    systems: dict[str, str]
    measures: tuple[Measure, ...]
    samples: tuple[Sample, ...]
    goals: tuple[Goal, ...] = ()

    def values(self, measure: str, system: str) -> list[float]:
        return [s.value for s in self.samples if (s.measure, s.system) == (measure, system)]

    def summary(self, measure: str, system: str) -> Summary | None:
        """Median and spread over the rounds; None where this system has no such measure."""
        values = self.values(measure, system)
        if not values:
            return None
        return Summary(
            median=statistics.median(values), low=min(values), high=max(values), count=len(values)
        )

    def ratio(self, measure: Measure, ours: str, theirs: str) -> float | None:
        """How much better ours is: the median of the rounds' ratios, above 1 if it is better."""
        pairs = [
            (mine, other)
            for mine, other in zip(
                self.values(measure.key, ours), self.values(measure.key, theirs), strict=False
            )
            if mine > 0 and other > 0
        ]
        if not pairs:
            return None
        if measure.more_is_better:
            return statistics.median(mine / other for mine, other in pairs)
        return statistics.median(other / mine for mine, other in pairs)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
