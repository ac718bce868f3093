"""Counts what the HTTP server has answered, for the gateway's metrics and its dashboard."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

BOUNDS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)
"""Upper bounds of the durations' buckets; one more holds what is longer."""


@dataclass(frozen=True)
class RouteCounts:
    """`buckets` has one count a bound of `BOUNDS_S` and one for what is longer."""

    by_status: Mapping[int, int]
    buckets: tuple[int, ...]
    seconds: float

    @property
    def count(self) -> int:
        return sum(self.buckets)


class _Counting:
    __slots__ = ("buckets", "by_status", "seconds")

    def __init__(self) -> None:
        self.by_status: dict[int, int] = {}
        self.buckets = [0] * (len(BOUNDS_S) + 1)
        self.seconds = 0.0


class HttpStatistics:
    """One kind of route at a time (`relay`, `handler`, `websocket`, `refused`)."""

    def __init__(self) -> None:
        self._routes: dict[str, _Counting] = {}
        self.num_connections = 0
        self.num_answering = 0

    def record(self, route: str, status: int, duration_s: float) -> None:
        """One request has ended, which was counted in `num_answering`."""
        self.num_answering -= 1
        counting = self._routes.get(route)
        if counting is None:
            counting = self._routes[route] = _Counting()
        counting.by_status[status] = counting.by_status.get(status, 0) + 1
        counting.buckets[bisect_left(BOUNDS_S, duration_s)] += 1
        counting.seconds += duration_s

    def counts(self) -> dict[str, RouteCounts]:
        return {
            route: RouteCounts(dict(each.by_status), tuple(each.buckets), each.seconds)
            for route, each in self._routes.items()
        }
