"""What the gateway is to reach beside others, held against one run's figures."""

from __future__ import annotations

from phalanx.bench.gateway_phases import SLOW_SHARE, key_of
from phalanx.bench.results import Goal, Report

OURS = "phalanx"
MAX_SLOW_SHARE = 15
_LIMITS = (
    ("json", "cpu", "nginx", 1.6),
    ("json", "added", "nginx", 1.6),
    ("json", "cpu", "sglang-router", 0.5),
    ("json", "cpu", "vllm-router", 0.5),
    ("binary", "cpu", "nginx", 1.2),
    ("sse", "cpu", "nginx", 1.3),
    ("role-json", "cpu", "nginx", 1.6),
    ("role-json", "added", "nginx", 1.6),
    ("role-sse", "cpu", "nginx", 1.3),
    ("websocket", "added", "nginx", 1.0),
    ("websocket", "cpu", "envoy", 1.0),
    ("websocket", "added", "envoy", 1.0),
    ("grpc", "cpu", "nginx", 1.3),
)
"""Ours is at most so many times theirs."""


def goals(report: Report) -> tuple[Goal, ...]:
    """Those for which the run has figures."""
    found = [_within(report, *limit) for limit in _LIMITS]
    found.append(_balanced(report))
    return tuple(goal for goal in found if goal is not None)


def _within(report: Report, traffic: str, value: str, peer: str, limit: float) -> Goal | None:
    measure = next((each for each in report.measures if each.key == key_of(traffic, value)), None)
    ratio = None if measure is None else report.ratio(measure, OURS, peer)
    if measure is None or ratio is None:
        return None
    times = 1 / ratio  # a report's ratio is above 1 where ours is better
    return Goal(
        aim=f"{measure.label}: at most {limit:g} times {peer}'s",
        result=f"{times:.2f} times",
        met=times <= limit,
    )


def _balanced(report: Report) -> Goal | None:
    summary = report.summary(SLOW_SHARE.key, OURS)
    if summary is None:
        return None
    return Goal(
        aim=f"a slow server beside a fast one gets at most {MAX_SLOW_SHARE} of 200 requests",
        result=f"{summary.high:.0f} at most",
        met=summary.high <= MAX_SLOW_SHARE,
    )
