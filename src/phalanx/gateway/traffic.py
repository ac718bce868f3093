"""What the requests of each server came to: counts, times and the last failures.

Everything here is bounded: quantiles are of the latest requests, rates of the last minute.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

from phalanx.clock import Clock
from phalanx.routing.load import Ticket

NUM_LATEST = 512
RATE_SECONDS = 60
NUM_FAILURES = 50


@dataclass(frozen=True)
class Quantiles:
    """In milliseconds, of the `num` latest requests; None where there were none."""

    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None


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
class ServerTraffic:
    """One server's, since it was registered. `per_second` is the last minute's, the oldest second
    first, the running one left out. `codes` counts requests by how they ended.
    """

    num_requests: int = 0
    num_failed: int = 0
    codes: dict[str, int] = field(default_factory=dict)
    latency: Quantiles = Quantiles(None, None, None)
    queue: Quantiles = Quantiles(None, None, None)
    per_second: tuple[int, ...] = (0,) * RATE_SECONDS


class _Seconds:
    """Counts in each of the last seconds."""

    def __init__(self) -> None:
        self._counts = [0] * (RATE_SECONDS + 1)
        self._second = 0

    def add(self, second: int) -> None:
        self._advance(second)
        self._counts[second % len(self._counts)] += 1

    def complete(self, second: int) -> tuple[int, ...]:
        """The seconds before `second`."""
        self._advance(second)
        size = len(self._counts)
        return tuple(self._counts[(second + offset) % size] for offset in range(1, size))

    def _advance(self, second: int) -> None:
        for passed in range(self._second + 1, min(second, self._second + len(self._counts)) + 1):
            self._counts[passed % len(self._counts)] = 0
        if second > self._second + len(self._counts):
            self._counts = [0] * len(self._counts)
        self._second = max(second, self._second)


class _Account:
    def __init__(self) -> None:
        self.codes: Counter[str] = Counter()
        self.latest_s: deque[float] = deque(maxlen=NUM_LATEST)
        self.queues_s: deque[float] = deque(maxlen=NUM_LATEST)
        self.seconds = _Seconds()


class Traffic:
    """By server id; the accounts of servers that are gone are dropped by `keep`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}
        self._failures: deque[Failure] = deque(maxlen=NUM_FAILURES)

    def ended(self, ticket: Ticket, duration_s: float) -> None:
        """A request left its server. What the model did not take of its time, where the server says
        what it took, is waiting and transfer.
        """
        server, code = ticket.server, ticket.code
        account = self._accounts.get(server.server_id)
        if account is None:
            account = self._accounts[server.server_id] = _Account()
        account.codes[code] += 1
        account.latest_s.append(duration_s)
        account.seconds.add(int(self._clock.monotonic_s()))
        if ticket.served_s is not None:
            account.queues_s.append(max(duration_s - ticket.served_s, 0.0))
        if is_failure(code):
            self._failures.append(
                Failure(
                    self._clock.wall_s(),
                    server.server_id,
                    server.model_name,
                    str(server.endpoint),
                    code,
                    ticket.message,
                )
            )

    def of(self, server_id: str) -> ServerTraffic:
        account = self._accounts.get(server_id)
        if account is None:
            return ServerTraffic()
        return ServerTraffic(
            num_requests=account.codes.total(),
            num_failed=sum(num for code, num in account.codes.items() if is_failure(code)),
            codes=dict(account.codes),
            latency=quantiles(account.latest_s),
            queue=quantiles(account.queues_s),
            per_second=account.seconds.complete(int(self._clock.monotonic_s())),
        )

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The latest ones of all servers, the newest last."""
        return tuple(self._failures)

    def keep(self, server_ids: frozenset[str]) -> None:
        """Drop the accounts of all others."""
        for server_id in self._accounts.keys() - server_ids:
            del self._accounts[server_id]


def is_failure(code: str) -> bool:
    """Whether a request that ended so failed, rather than was answered or left by its caller."""
    if code.isdecimal():
        return int(code) >= 500
    return code not in ("OK", "CANCELLED", "INVALID_ARGUMENT", "NOT_FOUND")


def quantiles(values_s: deque[float]) -> Quantiles:
    """By the nearest rank."""
    ordered = sorted(values_s)
    if not ordered:
        return Quantiles(None, None, None)
    at = [ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.95, 0.99)]
    return Quantiles(*(round(value * 1000, 3) for value in at))
