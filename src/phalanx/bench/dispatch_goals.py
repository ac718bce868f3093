"""What the way through the whole Engine is to reach, held against one run's figures."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.bench.replica_trials import DEATH, PARENT, WORKER, beside_key, steps_key
from phalanx.bench.results import Goal, Report
from phalanx.bench.round_trips import floor_key, trip_key

OURS = "phalanx"
SMALL_US, OBSERVATION_US = 100, 150
OBSERVATION_OF_ZMQ = 0.6
LARGE_OF_COPIES = 2.0
OBSERVATION_RATE = 8000
SCALING, SCALING_OF_PROCESSES = 1.85, 0.97
DEATH_MS = 50
# Whatever is kept for each of 100,000 requests takes more.
GROWTH_KIB = 1024
# Two medians of the same work differ by as much.
NOISE = 0.1


def goals(report: Report) -> tuple[Goal, ...]:
    """Those for which the run has figures."""
    found = (
        _within(report, "1kb", SMALL_US),
        _within(report, "600kb", OBSERVATION_US),
        _beside_zmq(report),
        _beside_copies(report),
        _rate(report),
        _scaling(report),
        _stopped(report),
        _death(report),
        _growth(report),
    )
    return tuple(goal for goal in found if goal is not None)


def _within(report: Report, payload: str, limit_us: float) -> Goal | None:
    p50_us = _median(report, trip_key(payload, 1, 1, "p50"))
    if p50_us is None:
        return None
    aim = f"{payload.upper()} round trip, p50 at most {limit_us:g} us"
    return Goal(aim=aim, result=f"{p50_us:.0f} us", met=p50_us <= limit_us)


def _beside_zmq(report: Report) -> Goal | None:
    key = trip_key("600kb", 1, 1, "p50")
    ours_us, theirs_us = _median(report, key), _median(report, key, "zmq")
    if ours_us is None or theirs_us is None:
        return None
    share = ours_us / theirs_us
    return Goal(
        aim=f"600KB round trip, p50 at most {OBSERVATION_OF_ZMQ:g} of zmq and msgpack",
        result=f"{share:.2f}",
        met=share <= OBSERVATION_OF_ZMQ,
    )


def _beside_copies(report: Report) -> Goal | None:
    ours_us = _median(report, trip_key("8mb", 1, 1, "p50"))
    copy_us = _median(report, floor_key("copies", "8mb"), "floor")
    handover_us = _median(report, floor_key("handovers", "8mb"), "floor")
    if ours_us is None or copy_us is None or handover_us is None:
        return None
    share = ours_us / (2 * copy_us)
    return Goal(
        aim=f"8MB round trip, p50 at most {LARGE_OF_COPIES:g} of two plain copies",
        result=f"{share:.2f} ({ours_us / handover_us:.2f} of a bare handover)",
        met=share <= LARGE_OF_COPIES,
    )


def _rate(report: Report) -> Goal | None:
    rate = _median(report, trip_key("600kb", 1, 8, "rate"))
    if rate is None:
        return None
    return Goal(
        aim=f"600KB, 8 in flight on one worker, at least {OBSERVATION_RATE:,} requests/s",
        result=f"{rate:,.0f} requests/s",
        met=rate >= OBSERVATION_RATE,
    )


def _scaling(report: Report) -> Goal | None:
    one, two = _median(report, steps_key(1)), _median(report, steps_key(2))
    processes = _median(report, steps_key(2), "floor")
    if one is None or two is None or processes is None:
        return None
    scaling, share = two / one, two / processes
    return Goal(
        aim=f"two replicas at least {SCALING:g} of one, or {SCALING_OF_PROCESSES:g} of two plain "
        "processes",
        result=f"{scaling:.2f} of one, {share:.2f} of two plain processes",
        met=scaling >= SCALING or share >= SCALING_OF_PROCESSES,
    )


def _stopped(report: Report) -> Goal | None:
    submit = _delay(report, "submit", 10)
    trip = _delay(report, "round trip", 50)
    if submit is None or trip is None:
        return None
    return Goal(
        aim="a stopped replica delays submits to the other by nothing measurable",
        result=f"submit {submit}, round trip {trip}",
        met=submit.unmeasurable and trip.unmeasurable,
    )


@dataclass(frozen=True)
class _Delay:
    """What a stopped replica adds to a time that `base_us` is beside a busy one, where
    `measurable_us` are more than what the rounds differ by.
    """

    delay_us: float
    base_us: float
    measurable_us: float

    @property
    def unmeasurable(self) -> bool:
        return self.delay_us <= self.measurable_us

    def __str__(self) -> str:
        return f"{self.base_us:.1f} {self.delay_us:+.1f} us (measurable {self.measurable_us:.1f})"


def _delay(report: Report, call: str, percent: int) -> _Delay | None:
    stopped = report.summary(beside_key("stopped", call, percent), OURS)
    busy = report.summary(beside_key("busy", call, percent), OURS)
    if stopped is None or busy is None:
        return None
    measurable_us = max(busy.high - busy.low, NOISE * busy.median)
    return _Delay(stopped.median - busy.median, busy.median, measurable_us)


def _death(report: Report) -> Goal | None:
    death = report.summary(DEATH.key, OURS)
    if death is None:
        return None
    return Goal(
        aim=f"every pending request has ended {DEATH_MS} ms after a worker's death",
        result=f"{death.median:.1f} ms, at worst {death.high:.1f} ms",
        met=death.high <= DEATH_MS,
    )


def _growth(report: Report) -> Goal | None:
    parent, worker = _median(report, PARENT.key), _median(report, WORKER.key)
    if parent is None or worker is None:
        return None
    return Goal(
        aim=f"tiny requests make neither process grow by more than {GROWTH_KIB} KiB",
        result=f"parent {parent:+,.0f} KiB, worker {worker:+,.0f} KiB",
        met=max(parent, worker) <= GROWTH_KIB,
    )


def _median(report: Report, key: str, system: str = OURS) -> float | None:
    summary = report.summary(key, system)
    return None if summary is None else summary.median
