"""What the benchmark of Cosmos3 measures: the time of a request, from its tokens to its latents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from phalanx.bench.cosmos3_cases import Case
from phalanx.bench.results import Measure
from phalanx.bench.running_system import RunningSystem
from phalanx.bench.turns import Asks
from phalanx.errors import RequestFailedError

AGREEMENT = {"float32": 1e-3, "bfloat16": 0.15}
"""How far latents may be from another system's, as a part of their size; both in the mean square."""


_Numbers = npt.NDArray[np.float64]


class _Run(msgspec.Struct, frozen=True):
    elapsed_s: float
    busiest_s: float


class _Latents(msgspec.Struct, frozen=True):
    video: list[float]
    actions: list[float]


class Requests:
    """A request a round, with prompts and noise that no system has seen, and all see alike."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._measure = Measure(
            key=time_key(case), label=f"{case.label}", unit="s", more_is_better=False
        )
        self._work = Measure(
            key=work_key(case),
            label=f"{case.label}, processor time of the busiest process",
            unit="s",
            more_is_better=False,
            plotted=False,
        )
        self._rounds: Counter[int] = Counter()

    @property
    def measures(self) -> tuple[Measure, ...]:
        return self._measure, self._work

    def warm_up(self, worker: Asks) -> None:
        """All that is compiled or kept of a size, in one step."""
        worker.ask("run", case=self._case.message() | {"num_steps": 1}, seed=0)

    def run(self, worker: Asks) -> Mapping[str, float]:
        self._rounds[id(worker)] += 1
        answer = worker.ask("run", case=self._case.message(), seed=self._rounds[id(worker)])
        found = msgspec.convert(answer, _Run)
        return {self._measure.key: found.elapsed_s, self._work.key: found.busiest_s}


def time_key(case: Case) -> str:
    return f"{case.key}_time"


def work_key(case: Case) -> str:
    return f"{case.key}_cpu"


def compared(case: Case, dtype: str, running: Sequence[RunningSystem]) -> dict[str, str]:
    """How far the latents of one request are from the first system's, by the others, in words.

    Raises `RequestFailedError` where they are others: times of different work say nothing.
    """
    first, *others = (_latents(one.worker, case) for one in running)
    differences: dict[str, str] = {}
    for one, found in zip(running[1:], others, strict=True):
        largest, part = _difference(first, found)
        if not part <= AGREEMENT[dtype]:
            raise RequestFailedError(
                f"{case.label}: latents of {one.name} differ from {running[0].name}'s by {part:.1e} "
                f"of their size, more than {AGREEMENT[dtype]}; they do not compute the same"
            )
        words = f"latents differ from {one.name}'s by, {case.label}"
        differences[words] = f"{largest:.1e} at most, {part:.1e} of their size"
    return differences


def _difference(first: _Numbers, other: _Numbers) -> tuple[float, float]:
    """The largest, and that of the mean square as a part of the mean square."""
    apart = np.abs(other - first)
    part = np.sqrt(np.mean(apart**2) / np.mean(first**2))
    return float(apart.max()), float(part)


def _latents(worker: Asks, case: Case) -> _Numbers:
    answer = worker.ask("latents", case=case.message(), seed=0)
    found = msgspec.convert(answer, _Latents)
    return np.array(found.video + found.actions)
