"""Lets systems take turns: in each round each phase is run by all of them one after another
(A B A B), so that what else the machine does meets all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.progress import Progress

from phalanx.bench.results import Measure, Sample


class Asks(Protocol):
    """A worker, as a phase sees it."""

    def ask(self, kind: str, **message: object) -> dict[str, object]: ...
    def cpu_s(self) -> float: ...


class Phase(Protocol):
    """One kind of work; `run` returns values by the keys of `measures`, of which the first names
    the phase.
    """

    @property
    def measures(self) -> tuple[Measure, ...]: ...
    def warm_up(self, worker: Asks) -> None: ...
    def run(self, worker: Asks) -> Mapping[str, float]: ...


@dataclass(frozen=True)
class Turn:
    """One phase, run by one system."""

    phase: Phase
    system: str
    worker: Asks


def take_turns(turns: Sequence[Turn], repeats: int, bar: Progress) -> list[Sample]:
    """Warm all up, then run all of them `repeats` times, in their order."""
    samples = []
    task = bar.add_task("warming up", total=(repeats + 1) * len(turns))
    for turn in turns:
        turn.phase.warm_up(turn.worker)
        bar.advance(task)
    for repeat in range(repeats):
        for turn in turns:
            label = turn.phase.measures[0].label
            bar.update(task, description=f"{repeat + 1}/{repeats} {label}: {turn.system}")
            for key, value in turn.phase.run(turn.worker).items():
                samples.append(Sample(measure=key, system=turn.system, repeat=repeat, value=value))
            bar.advance(task)
    return samples
