"""What is known of each replica, and which one the next request goes to.

Not safe by itself: the request table calls it under its lock, so that choosing a replica and
counting the request there are one step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from phalanx.schema.statistics import (
    QUEUE_TIME_BUCKETS_S,
    EngineStatistics,
    LoopStatistics,
    ReplicaStatistics,
)


@dataclass(eq=False)
class ReplicaAccount:
    """Counters of one replica. It is busy while at least one request is in flight there."""

    replica: int
    opened_s: float
    healthy: bool = True
    num_in_flight: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    queue_time_s: float = 0.0
    execution_time_s: float = 0.0
    request_bytes: int = 0
    response_bytes: int = 0
    max_request_bytes: int = 0
    _queue_time_counts: list[int] = field(
        default_factory=lambda: [0] * (len(QUEUE_TIME_BUCKETS_S) + 1)
    )
    _busy_s: float = 0.0
    _busy_since_s: float = 0.0

    def enter(self, now_s: float) -> None:
        """One more request is in flight."""
        if self.num_in_flight == 0:
            self._busy_since_s = now_s
        self.num_in_flight += 1

    def start(self, queue_time_s: float) -> None:
        """A request's first step begins, this long after its submit."""
        self.queue_time_s += queue_time_s
        self._queue_time_counts[bisect_left(QUEUE_TIME_BUCKETS_S, queue_time_s)] += 1

    def leave(self, now_s: float) -> None:
        """One request has ended."""
        self.num_in_flight -= 1
        if self.num_in_flight == 0:
            self._busy_s += now_s - self._busy_since_s

    def carry(self, request_bytes: int) -> None:
        """A request of this size was sent to the replica."""
        self.request_bytes += request_bytes
        self.max_request_bytes = max(self.max_request_bytes, request_bytes)

    def statistics(self, now_s: float, loop: LoopStatistics | None) -> ReplicaStatistics:
        running_s = now_s - self._busy_since_s if self.num_in_flight else 0.0
        return ReplicaStatistics(
            replica=self.replica,
            num_completed=self.num_completed,
            num_failed=self.num_failed,
            num_cancelled=self.num_cancelled,
            num_in_flight=self.num_in_flight,
            queue_time_s=self.queue_time_s,
            execution_time_s=self.execution_time_s,
            busy_s=self._busy_s + running_s,
            uptime_s=now_s - self.opened_s,
            request_bytes=self.request_bytes,
            response_bytes=self.response_bytes,
            max_request_bytes=self.max_request_bytes,
            queue_time_counts=tuple(self._queue_time_counts),
            loop=loop,
        )


class ReplicaChooser:
    """Picks the healthy replica with the fewest requests in flight; among equals they take turns."""

    def __init__(self, accounts: Sequence[ReplicaAccount]) -> None:
        self._accounts = tuple(accounts)
        self._cursor = 0

    def choose(self) -> ReplicaAccount | None:
        """The next request's replica; None where no replica is healthy."""
        count = len(self._accounts)
        # In the order of their turns, so that the first of the least loaded is the next in turn.
        in_turn = [self._accounts[(self._cursor + step) % count] for step in range(count)]
        healthy = [account for account in in_turn if account.healthy]
        if not healthy:
            return None
        chosen = min(healthy, key=lambda account: account.num_in_flight)
        self._cursor = (chosen.replica + 1) % count
        return chosen


def totals(
    accounts: Sequence[ReplicaAccount], loops: Sequence[LoopStatistics | None], now_s: float
) -> EngineStatistics:
    """The counters of all replicas, of each and together; `loops` are those of their loops."""
    return EngineStatistics(
        num_completed=sum(account.num_completed for account in accounts),
        num_failed=sum(account.num_failed for account in accounts),
        num_cancelled=sum(account.num_cancelled for account in accounts),
        queue_time_s=sum(account.queue_time_s for account in accounts),
        execution_time_s=sum(account.execution_time_s for account in accounts),
        loop=combined(loops),
        replicas=tuple(
            account.statistics(now_s, loop) for account, loop in zip(accounts, loops, strict=True)
        ),
    )


def combined(loops: Sequence[LoopStatistics | None]) -> LoopStatistics | None:
    """The counters of all replicas as one loop's; None where no replica has a loop."""
    known = [loop for loop in loops if loop is not None]
    if len(known) <= 1:
        return known[0] if known else None
    counts = {
        name: sum(getattr(loop, name) for loop in known)
        for name in LoopStatistics.__struct_fields__
        if name not in ("paused", "asleep", "waiting_for_weights", "stage_s")
    }
    stage_s: Counter[str] = Counter()
    for loop in known:
        stage_s.update(loop.stage_s)
    paused = all(loop.paused for loop in known)
    return LoopStatistics(
        **counts,
        paused=paused,
        asleep=frozenset().union(*(loop.asleep for loop in known)),
        waiting_for_weights=any(loop.waiting_for_weights for loop in known),
        stage_s=dict(stage_s),
    )


def idle(loop: LoopStatistics) -> LoopStatistics:
    """The counters of a loop that has ended: what it held is gone, what it did stays."""
    return msgspec.structs.replace(
        loop,
        num_running=0,
        num_waiting=0,
        num_offloaded=0,
        last_batch_size=0,
        pool_used_tokens=0,
        pool_cached_tokens=0,
    )
