"""What the requests of each server came to: counts, times and the last failures.

Everything here is bounded: quantiles are of the latest requests, rates of the last minute. A request
is only noted when it ends: notes are summed up together, when somebody reads or there are many.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import add

from phalanx.clock import Clock
from phalanx.routing.load import LEFT, Ticket

NUM_LATEST = 512
RATE_SECONDS = 60
NUM_FAILURES = 50
NUM_NOTES = 512
MAX_MESSAGE = 300
BOUNDS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
OK = "200"
"""How most requests end; not looked into further."""
_CALLERS = frozenset(
    {LEFT, "OK", "INVALID_ARGUMENT", "NOT_FOUND", "UNAUTHENTICATED", "PERMISSION_DENIED"}
)


@dataclass(frozen=True)
class Quantiles:
    """In milliseconds, of the latest requests; None where there were none."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


@dataclass(frozen=True)
class Failure:
    """One request that did not come to a good end."""

    wall_s: float
    server_id: str
    model_name: str
    endpoint: str
    code: str
    message: str


@dataclass(frozen=True)
class Histogram:
    """`counts` has one count a bound of `BOUNDS_S`, and one for what is longer."""

    counts: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)
    seconds: float = 0.0


@dataclass(frozen=True)
class ServerTraffic:
    """One server's, since it was registered. `codes` counts requests by how they ended.

    `per_second` is the last minute's, the oldest second first, the running one left out.
    """

    codes: Mapping[str, int] = field(default_factory=dict)
    latency: Quantiles = Quantiles()
    queue: Quantiles = Quantiles()
    latency_histogram: Histogram = Histogram()
    queue_histogram: Histogram = Histogram()
    per_second: tuple[int, ...] = (0,) * RATE_SECONDS

    @property
    def num_requests(self) -> int:
        return sum(self.codes.values())

    @property
    def num_failed(self) -> int:
        return sum(num for code, num in self.codes.items() if is_failure(code))


class Traffic:
    """By server id; the accounts of servers that are gone are dropped by `keep`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._failures: deque[Failure] = deque(maxlen=NUM_FAILURES)

    def ended(self, ticket: Ticket, duration_s: float) -> None:
        """A request left its server. What the model did not take of its time, where the server says
        what it took, is waiting and transfer.
        """
        server, code = ticket.server, ticket.code
        account = self._accounts.get(server.server_id)
        if account is None:
            account = self._accounts[server.server_id] = Account()
        account.notes.append((code, ticket.started_s, duration_s, ticket.served_s))
        if len(account.notes) >= NUM_NOTES:
            account.sum_up()
        if code != OK and is_failure(code):
            self._failures.append(
                Failure(
                    self._clock.wall_s(),
                    server.server_id,
                    server.model_name,
                    str(server.endpoint),
                    code,
                    ticket.message[:MAX_MESSAGE],
                )
            )

    def of(self, server_id: str) -> ServerTraffic:
        account = self._accounts.get(server_id)
        if account is None:
            return ServerTraffic()
        return account.told(self._clock.monotonic_s())

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The latest ones of all servers, the newest last."""
        return tuple(self._failures)

    def keep(self, server_ids: frozenset[str]) -> None:
        """Drop the accounts of all others."""
        for server_id in self._accounts.keys() - server_ids:
            del self._accounts[server_id]


def is_failure(code: str) -> bool:
    """Whether a request that ended so failed, rather than was answered, or refused or left for a
    reason of its caller's.
    """
    if code.isdecimal():
        return int(code) >= 500
    return code not in _CALLERS


def buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """A histogram's counts as Prometheus has them: cumulative, by the bound's name."""
    names = [*(str(bound) for bound in bounds), "+Inf"]
    return [(name, float(num)) for name, num in zip(names, accumulate(counts), strict=True)]


class _Times:
    """Durations: all of them in buckets, the latest ones as they are."""

    def __init__(self) -> None:
        self._latest_s: deque[float] = deque(maxlen=NUM_LATEST)
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0
        self._quantiles: Quantiles | None = Quantiles()

    def add(self, durations_s: Sequence[float]) -> None:
        self._latest_s.extend(durations_s)
        ordered = sorted(durations_s)
        begin = 0
        for bucket, bound_s in enumerate(BOUNDS_S):
            end = bisect_right(ordered, bound_s, begin)
            self._counts[bucket] += end - begin
            begin = end
        self._counts[-1] += len(ordered) - begin
        self._sum_s += sum(ordered)
        self._quantiles = None

    def histogram(self) -> Histogram:
        return Histogram(tuple(self._counts), self._sum_s)

    def quantiles(self) -> Quantiles:
        """By the nearest rank; sorted anew only when there are new ones."""
        if self._quantiles is None:
            ordered = sorted(self._latest_s)
            ranks = [math.ceil(share * len(ordered)) - 1 for share in (0.5, 0.95, 0.99)]
            self._quantiles = Quantiles(*(round(ordered[rank] * 1000, 3) for rank in ranks))
        return self._quantiles


class _Seconds:
    """Counts in each of the last seconds, in a ring that the running second belongs to."""

    def __init__(self) -> None:
        self._counts = [0] * (RATE_SECONDS + 1)
        self._second = 0

    def add(self, times_s: Sequence[float]) -> None:
        """What is older than the ring is passed over."""
        ordered = sorted(times_s)
        last = int(ordered[-1])
        first = max(int(ordered[0]), last - RATE_SECONDS)
        begin = bisect_left(ordered, first)
        for second in range(first, last + 1):
            end = bisect_left(ordered, second + 1, begin)
            self._go_on_to(second)
            self._counts[second % len(self._counts)] += end - begin
            begin = end

    def complete(self, second: int) -> tuple[int, ...]:
        """Those before `second`."""
        self._go_on_to(second)
        size = len(self._counts)
        return tuple(self._counts[(second + offset) % size] for offset in range(1, size))

    def _go_on_to(self, second: int) -> None:
        if second - self._second >= len(self._counts):
            self._counts = [0] * len(self._counts)
        else:
            for passed in range(self._second + 1, second + 1):
                self._counts[passed % len(self._counts)] = 0
        self._second = max(second, self._second)


class Account:
    """The requests of one server. `notes` are those that are not yet in the sums: how each has
    ended, when it began, how long it was there, and how long its model took.
    """

    def __init__(self) -> None:
        self.notes: list[tuple[str, float, float, float | None]] = []
        self._codes: dict[str, int] = {}
        self._latency = _Times()
        self._queue = _Times()
        self._seconds = _Seconds()

    def told(self, now_s: float) -> ServerTraffic:
        self.sum_up()
        return ServerTraffic(
            codes=dict(self._codes),
            latency=self._latency.quantiles(),
            queue=self._queue.quantiles(),
            latency_histogram=self._latency.histogram(),
            queue_histogram=self._queue.histogram(),
            per_second=self._seconds.complete(int(now_s)),
        )

    def sum_up(self) -> None:
        notes, self.notes = self.notes, []
        if not notes:
            return
        codes, begins_s, durations_s, served_s = zip(*notes, strict=True)
        for code in set(codes):
            self._codes[code] = self._codes.get(code, 0) + codes.count(code)
        self._latency.add(durations_s)
        self._seconds.add(list(map(add, begins_s, durations_s)))
        if served_s.count(None) < len(served_s):
            pairs = zip(durations_s, served_s, strict=True)
            self._queue.add(
                [max(each - served, 0.0) for each, served in pairs if served is not None]
            )
