"""Trials of several replicas: twice the work, a stopped worker, a killed one, very many requests."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from rich.progress import Progress

from phalanx.bench.dispatch_workload import DispatchWorkload
from phalanx.bench.results import Measure, Sample, percentile
from phalanx.bench.turns import Asks

DEATH = Measure(
    key="death",
    label="kill -9 of a worker to the last end",
    unit="ms",
    more_is_better=False,
)
PARENT = Measure(
    key="parent_growth",
    label="growth of the parent, tiny requests",
    unit="KiB",
    more_is_better=False,
    plotted=False,
)
WORKER = Measure(
    key="worker_growth",
    label="growth of the worker, tiny requests",
    unit="KiB",
    more_is_better=False,
    plotted=False,
)


class _Calibration(msgspec.Struct, frozen=True):
    num_iterations: int


class _Seconds(msgspec.Struct, frozen=True):
    seconds: float


class _Beside(msgspec.Struct, frozen=True):
    submits_s: list[float]
    trips_s: list[float]


class _Memory(msgspec.Struct, frozen=True):
    parent_bytes: int
    worker_bytes: int


def steps_key(num_replicas: int) -> str:
    return f"steps_{num_replicas}"


def beside_key(other: str, call: str, percent: int) -> str:
    return f"beside_{other}_{call.replace(' ', '_')}_p{percent}"


def calibrated(worker: Asks, seconds: float) -> int:
    """Iterations of the busy loop that take this long on this machine."""
    return msgspec.convert(worker.ask("calibrate", seconds=seconds), _Calibration).num_iterations


class Steps:
    """So many replicas, or processes without an engine, compute steps at the same time."""

    def __init__(self, num_replicas: int, workload: DispatchWorkload, num_iterations: int) -> None:
        self._num_replicas = num_replicas
        self._count = workload.num_steps
        self._num_iterations = num_iterations
        at_once = "one replica" if num_replicas == 1 else f"{num_replicas} replicas"
        label = f"steps of {workload.step_s * 1e3:g} ms, {at_once}"
        self.measures = (Measure(key=steps_key(num_replicas), label=label, unit="steps/s"),)

    def warm_up(self, worker: Asks) -> None:
        self._seconds(worker, 1)

    def run(self, worker: Asks) -> Mapping[str, float]:
        seconds = self._seconds(worker, self._count)
        return {steps_key(self._num_replicas): self._num_replicas * self._count / seconds}

    def _seconds(self, worker: Asks, count: int) -> float:
        answer = worker.ask(
            "steps",
            num_replicas=self._num_replicas,
            count=count,
            num_iterations=self._num_iterations,
        )
        return msgspec.convert(answer, _Seconds).seconds


class Beside:
    """Requests to one replica, one after another, while the other is `busy` or `stopped`.

    Both ways each request goes to the same replica, so that only the state of the other differs.
    The median of a submit also depends on whether the worker that it wakes takes the caller's
    processor; its fastest tenth does not.
    """

    _VALUES = (("submit", 10), ("submit", 50), ("submit", 99), ("round trip", 50))

    def __init__(self, other: str, workload: DispatchWorkload) -> None:
        self._other = other
        self._count = workload.num_beside
        self._num_waiting = workload.num_waiting
        self.measures = tuple(
            Measure(
                key=beside_key(other, call, percent),
                label=f"beside a {other} replica, {call}, p{percent}",
                unit="us",
                more_is_better=False,
                plotted=percent == 10,
            )
            for call, percent in self._VALUES
        )

    def warm_up(self, worker: Asks) -> None:
        self._ask(worker, 1)

    def run(self, worker: Asks) -> Mapping[str, float]:
        times = self._ask(worker, self._count)
        of_calls = {"submit": times.submits_s, "round trip": times.trips_s}
        return {
            beside_key(self._other, call, percent): percentile(of_calls[call], percent / 100) * 1e6
            for call, percent in self._VALUES
        }

    def _ask(self, worker: Asks, count: int) -> _Beside:
        if self._other == "busy":
            answer = worker.ask("busy", count=count)
        else:
            answer = worker.ask("stopped", count=count, num_waiting=self._num_waiting)
        return msgspec.convert(answer, _Beside)


class Death:
    """One worker of two is killed while requests are pending at both; each trial a new engine."""

    measures = (DEATH,)

    def __init__(self, num_pending: int) -> None:
        self._num_pending = num_pending

    def warm_up(self, worker: Asks) -> None: ...

    def run(self, worker: Asks) -> Mapping[str, float]:
        answer = worker.ask("death", num_pending=self._num_pending)
        return {DEATH.key: msgspec.convert(answer, _Seconds).seconds * 1e3}


def tiny_requests(worker: Asks, workload: DispatchWorkload, bar: Progress) -> list[Sample]:
    """Very many requests in chunks; how much memory grew from the end of the first chunk on."""
    task = bar.add_task("tiny requests", total=workload.num_tiny + workload.tiny_chunk)
    seen = []
    for _ in range(1 + max(1, workload.num_tiny // workload.tiny_chunk)):
        answer = worker.ask("tiny_requests", count=workload.tiny_chunk)
        seen.append(msgspec.convert(answer, _Memory))
        bar.advance(task, workload.tiny_chunk)
    first, last = seen[0], seen[-1]
    growths = {
        PARENT.key: last.parent_bytes - first.parent_bytes,
        WORKER.key: last.worker_bytes - first.worker_bytes,
    }
    return [
        Sample(measure=key, system="phalanx", repeat=0, value=grown / 1024)
        for key, grown in growths.items()
    ]
