"""What Cosmos3 is to reach beside diffusers and over two ranks, held against one run's figures."""

from __future__ import annotations

import statistics

from phalanx.bench.cosmos3_cases import CASES, Case
from phalanx.bench.cosmos3_phases import time_key, work_key
from phalanx.bench.results import Goal, Report

OURS, TWO_RANKS, THEIRS = "phalanx", "phalanx-cfg2", "diffusers"
OF_DIFFUSERS, OF_ONE_RANK = 0.75, 0.6


def goals(report: Report) -> tuple[Goal, ...]:
    """Those for which the run has figures."""
    found = [goal for case in CASES for goal in (_beside(report, case), _over_ranks(report, case))]
    return tuple(goal for goal in found if goal is not None)


def _beside(report: Report, case: Case) -> Goal | None:
    aim = f"{case.label} on one rank in at most {OF_DIFFUSERS:g} of diffusers' time"
    return _share(report, case, (OURS, THEIRS), aim, OF_DIFFUSERS)


def _over_ranks(report: Report, case: Case) -> Goal | None:
    aim = f"{case.label} on two ranks in at most {OF_ONE_RANK:g} of one rank's time"
    return _share(report, case, (TWO_RANKS, OURS), aim, OF_ONE_RANK)


def _share(
    report: Report, case: Case, systems: tuple[str, str], aim: str, limit: float
) -> Goal | None:
    """The median of the rounds' shares, with the lowest and the highest; also of processor time,
    which says more where others want the processors too.
    """
    shares, of_work = (
        _shares(*(report.values(key, system) for system in systems))
        for key in (time_key(case), work_key(case))
    )
    if not shares:
        return None
    share = statistics.median(shares)
    result = f"{share:.2f} ({min(shares):.2f} to {max(shares):.2f})"
    if of_work:
        result += f"; of processor time {statistics.median(of_work):.2f}"
    return Goal(aim=aim, result=result, met=share <= limit)


def _shares(ours: list[float], others: list[float]) -> list[float]:
    return [mine / other for mine, other in zip(ours, others, strict=False) if other > 0]
