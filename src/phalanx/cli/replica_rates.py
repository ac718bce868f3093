"""How busy replicas were between two snapshots of their counters: pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from phalanx.schema.statistics import EngineStatistics, ReplicaStatistics


@dataclass(frozen=True)
class Rates:
    """One row: a replica's, or that of all. None where nothing happened to take a mean of.

    Over the interval: `completed_per_s`, the mean times, `busy` (a fraction) and
    `payload_bytes_per_s`. Since the start: `num_failed`, `max_request_bytes`. Now: the others.
    """

    name: str
    completed_per_s: float
    num_failed: int
    num_in_flight: int
    queue_s: float | None
    execution_s: float | None
    busy: float
    utilization: float | None
    payload_bytes_per_s: float
    max_request_bytes: int


@dataclass(frozen=True)
class Load:
    """All rows. `interval_s` None: they are over the whole time since the start."""

    interval_s: float | None
    replicas: tuple[Rates, ...]
    total: Rates


def load_between(before: EngineStatistics | None, after: EngineStatistics) -> Load:
    """What happened from `before` to `after`.

    It is what happened since the start where `before` is None, or of a server that has been
    started anew since.
    """
    now = after.replicas
    earlier = () if before is None else before.replicas
    comparable = _comparable(earlier, now)
    starts = earlier if comparable else [ReplicaStatistics(replica=one.replica) for one in now]
    changes = [_Change.between(old, new) for old, new in zip(starts, now, strict=True)]
    return Load(
        interval_s=max((change.span_s for change in changes), default=0.0) if comparable else None,
        replicas=tuple(
            _rates(str(new.replica), [new], [change])
            for new, change in zip(now, changes, strict=True)
        ),
        total=_rates("all", now, changes),
    )


@dataclass(frozen=True)
class _Change:
    """What a replica's counters gained in `span_s` seconds."""

    span_s: float
    num_completed: int
    num_started: int
    num_ended: int
    queue_time_s: float
    execution_time_s: float
    busy_s: float
    payload_bytes: int

    @classmethod
    def between(cls, old: ReplicaStatistics, new: ReplicaStatistics) -> _Change:
        return cls(
            span_s=new.uptime_s - old.uptime_s,
            num_completed=new.num_completed - old.num_completed,
            num_started=new.num_started - old.num_started,
            num_ended=new.num_ended - old.num_ended,
            queue_time_s=new.queue_time_s - old.queue_time_s,
            execution_time_s=new.execution_time_s - old.execution_time_s,
            busy_s=new.busy_s - old.busy_s,
            payload_bytes=_payload_bytes(new) - _payload_bytes(old),
        )

    def per_s(self, amount: float) -> float:
        return amount / self.span_s if self.span_s > 0 else 0.0


def _comparable(before: Sequence[ReplicaStatistics], after: Sequence[ReplicaStatistics]) -> bool:
    """Whether these are counters of the same replicas, which only grow."""
    return len(before) == len(after) > 0 and all(
        old.uptime_s < new.uptime_s and old.num_ended <= new.num_ended
        for old, new in zip(before, after, strict=True)
    )


def _payload_bytes(one: ReplicaStatistics) -> int:
    return one.request_bytes + one.response_bytes


def _rates(name: str, now: Sequence[ReplicaStatistics], changes: Sequence[_Change]) -> Rates:
    measured = [one.device_utilization for one in now if one.device_utilization is not None]
    return Rates(
        name=name,
        completed_per_s=sum(change.per_s(change.num_completed) for change in changes),
        num_failed=sum(one.num_failed for one in now),
        num_in_flight=sum(one.num_in_flight for one in now),
        queue_s=_mean((change.queue_time_s, change.num_started) for change in changes),
        execution_s=_mean((change.execution_time_s, change.num_ended) for change in changes),
        busy=fmean(change.per_s(change.busy_s) for change in changes) if changes else 0.0,
        utilization=fmean(measured) if measured else None,
        payload_bytes_per_s=sum(change.per_s(change.payload_bytes) for change in changes),
        max_request_bytes=max((one.max_request_bytes for one in now), default=0),
    )


def _mean(parts: Iterable[tuple[float, int]]) -> float | None:
    """The sum of the amounts over the sum of the counts."""
    total, count = 0.0, 0
    for amount, many in parts:
        total += amount
        count += many
    return total / count if count else None
