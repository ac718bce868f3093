"""Counts what the HTTP server has answered, for the gateway's metrics and its dashboard."""

from __future__ import annotations

from bisect import bisect_right
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
NUM_NOTES = 512
"""Requests that are summed up together, when nobody asks before."""


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
    """`notes` are the statuses and durations of requests that are not yet in the sums."""

    __slots__ = ("_buckets", "_by_status", "_seconds", "notes")

    def __init__(self) -> None:
        self.notes: list[tuple[int, float]] = []
        self._by_status: dict[int, int] = {}
        self._buckets = [0] * (len(BOUNDS_S) + 1)
        self._seconds = 0.0

    def sum_up(self) -> None:
        notes, self.notes = self.notes, []
        if not notes:
            return
        statuses, durations_s = zip(*notes, strict=True)
        for status in set(statuses):
            self._by_status[status] = self._by_status.get(status, 0) + statuses.count(status)
        ordered = sorted(durations_s)
        begin = 0
        for bucket, bound_s in enumerate(BOUNDS_S):
            end = bisect_right(ordered, bound_s, begin)
            self._buckets[bucket] += end - begin
            begin = end
        self._buckets[-1] += len(ordered) - begin
        self._seconds += sum(ordered)

    def counts(self) -> RouteCounts:
        self.sum_up()
        return RouteCounts(dict(self._by_status), tuple(self._buckets), self._seconds)


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
        notes = counting.notes
        notes.append((status, duration_s))
        if len(notes) >= NUM_NOTES:
            counting.sum_up()

    def counts(self) -> dict[str, RouteCounts]:
        return {route: each.counts() for route, each in self._routes.items()}
