"""One run of a benchmark, from its beginning to its report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from phalanx.bench.machine import machine
from phalanx.bench.report_files import deliver, report_console
from phalanx.bench.results import Goal, Measure, Report, Sample


def no_goals(report: Report) -> tuple[Goal, ...]:
    """Nothing was aimed at."""
    return ()


class BenchmarkRun:
    """Begins when it is made. `console` shows its progress; `folder` is made for its report, unless
    it was made before for whatever else is kept of the run.
    """

    def __init__(self, name: str, output: Path) -> None:
        self.console = report_console()
        self._name = name
        self._load = os.getloadavg()[0]
        self._started = datetime.now(UTC)
        self.folder = output / f"{name}-{self._started:%Y%m%d-%H%M%S}"

    def deliver(
        self,
        systems: Mapping[str, str],
        measures: Iterable[Measure],
        samples: Iterable[Sample],
        *,
        context: Mapping[str, str] | None = None,
        goals: Callable[[Report], Iterable[Goal]] = no_goals,
    ) -> Path:
        """Write the report, show its table and its goals, and return the folder."""
        report = Report(
            name=self._name,
            started=f"{self._started:%Y-%m-%d %H:%M} UTC",
            context={
                "machine": machine(),
                "load average at the start": f"{self._load:.2f}",
                **(context or {}),
            },
            systems=dict(systems),
            measures=tuple(measures),
            samples=tuple(samples),
        )
        report = msgspec.structs.replace(report, goals=tuple(goals(report)))
        deliver(report, self.folder, self.console)
        return self.folder
