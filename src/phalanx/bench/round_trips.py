"""Round trips to worker processes and back: each transport's, and the floors that nothing beats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from phalanx.bench.dispatch_workload import DispatchWorkload, Payload
from phalanx.bench.results import Measure, percentile
from phalanx.bench.turns import Asks

Value = Literal["p50", "p99", "rate", "cpu"]
FloorKind = Literal["copies", "handovers"]
_CHECKED = 8


class _RoundTripTimes(msgspec.Struct, frozen=True):
    seconds: float
    times_s: list[float]


class _Times(msgspec.Struct, frozen=True):
    times_s: list[float]


def trip_key(payload: str, num_workers: int, in_flight: int, value: Value) -> str:
    return f"{payload}_{num_workers}w_{in_flight}_{value}"


def floor_key(kind: FloorKind, payload: str) -> str:
    return f"{kind}_{payload}"


class RoundTrips:
    """One size of observation, with so many in flight to so many workers.

    The processor time of a request is all processes' together, and told with one in flight.
    """

    def __init__(self, payload: Payload, num_workers: int, in_flight: int) -> None:
        self._payload = payload
        self._in_flight = in_flight
        workers = "1 worker" if num_workers == 1 else f"{num_workers} workers"
        label = f"{payload.label}, {workers}, {in_flight} in flight"
        self._keys: dict[Value, str] = {
            value: trip_key(payload.key, num_workers, in_flight, value)
            for value in ("p50", "p99", "rate", "cpu")
        }
        keys = self._keys
        rate = Measure(key=keys["rate"], label=label, unit="requests/s", plotted=in_flight > 1)
        measures = [
            _time(keys["p50"], f"{label}, p50", plotted=in_flight == 1),
            _time(keys["p99"], f"{label}, p99", plotted=False),
            rate,
        ]
        if in_flight == 1:
            measures.append(_time(keys["cpu"], f"{label}, processor time", plotted=False))
        self.measures = tuple(measures)

    def warm_up(self, worker: Asks) -> None:
        """Also checks that each observation gets its own answer."""
        worker.ask("check", count=_CHECKED, **self._payload.sizes())
        self._ask(worker, 2 * self._in_flight)

    def run(self, worker: Asks) -> Mapping[str, float]:
        count = self._payload.num_requests
        before_s = worker.cpu_s()
        times = self._ask(worker, count)
        cpu_s = worker.cpu_s() - before_s
        values = {
            self._keys["p50"]: percentile(times.times_s, 0.5) * 1e6,
            self._keys["p99"]: percentile(times.times_s, 0.99) * 1e6,
            self._keys["rate"]: count / times.seconds,
        }
        if self._in_flight == 1:
            values[self._keys["cpu"]] = cpu_s / count * 1e6
        return values

    def _ask(self, worker: Asks, count: int) -> _RoundTripTimes:
        answer = worker.ask(
            "round_trips", count=count, in_flight=self._in_flight, **self._payload.sizes()
        )
        return msgspec.convert(answer, _RoundTripTimes)


class PayloadFloor:
    """What moving a payload costs at least: `copies`, once in one process into memory that is there;
    `handovers`, through shared memory into another process's own.
    """

    def __init__(self, kind: FloorKind, payload: Payload) -> None:
        self._kind = kind
        self._payload = payload
        words = "copy" if kind == "copies" else "bare handover"
        self._key = floor_key(kind, payload.key)
        self.measures = (_time(self._key, f"{words} of {payload.label}, p50"),)

    def warm_up(self, worker: Asks) -> None:
        self._ask(worker, 1)

    def run(self, worker: Asks) -> Mapping[str, float]:
        times = self._ask(worker, self._payload.num_requests)
        return {self._key: percentile(times.times_s, 0.5) * 1e6}

    def _ask(self, worker: Asks, count: int) -> _Times:
        answer = worker.ask(self._kind, num_bytes=self._payload.num_bytes, count=count)
        return msgspec.convert(answer, _Times)


class PingPong:
    """The floor of two wake-ups: one byte to another process and back."""

    measures = (
        Measure(
            key="ping_pong",
            label="one byte there and back, p50",
            unit="us",
            more_is_better=False,
            plotted=False,
        ),
    )

    def __init__(self, count: int) -> None:
        self._count = count

    def warm_up(self, worker: Asks) -> None:
        worker.ask("ping_pongs", count=1)

    def run(self, worker: Asks) -> Mapping[str, float]:
        answer = worker.ask("ping_pongs", count=self._count)
        times = msgspec.convert(answer, _Times)
        return {"ping_pong": percentile(times.times_s, 0.5) * 1e6}


def round_trips(workload: DispatchWorkload, num_workers: int) -> Iterator[RoundTrips]:
    """Every size with every number in flight."""
    for payload in workload.payloads:
        for in_flight in workload.in_flight:
            yield RoundTrips(payload, num_workers, in_flight)


def floors(workload: DispatchWorkload) -> Iterator[PayloadFloor | PingPong]:
    """What the sizes and the machine allow at best."""
    yield PingPong(workload.payloads[0].num_requests)
    for payload in workload.payloads:
        yield PayloadFloor("copies", payload)
        yield PayloadFloor("handovers", payload)


def _time(key: str, label: str, *, plotted: bool = False) -> Measure:
    return Measure(key=key, label=label, unit="us", more_is_better=False, plotted=plotted)
