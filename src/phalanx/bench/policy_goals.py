"""What pi0.5 is to reach beside LeRobot, held against one run's figures."""

from __future__ import annotations

import statistics

from phalanx.bench.policy_phases import ALONE, TOGETHER, Case, several_key
from phalanx.bench.results import Goal, Report

OURS, THEIRS = "phalanx", "lerobot"
MASKED = Case("masked", "2 of 3 cameras, prompt of 40", 2, 40)
FULL = Case("full", "3 cameras, prompt of 200", 3, 200)
MASKED_OF_LEROBOT, FULL_OF_LEROBOT = 0.6, 0.95
TOGETHER_OF_ALONE = 0.9


def goals(report: Report) -> tuple[Goal, ...]:
    """Those for which the run has figures."""
    found = (
        _beside_lerobot(report, MASKED, MASKED_OF_LEROBOT),
        _beside_lerobot(report, FULL, FULL_OF_LEROBOT),
        _together(report),
    )
    return tuple(goal for goal in found if goal is not None)


def _beside_lerobot(report: Report, case: Case, limit: float) -> Goal | None:
    ours, theirs = report.values(case.key, OURS), report.values(case.key, THEIRS)
    return _share(
        f"a chunk, {case.label}, at most {limit:g} of LeRobot's time", ours, theirs, limit
    )


def _together(report: Report) -> Goal | None:
    together = report.values(several_key(TOGETHER), OURS)
    alone = report.values(several_key(ALONE), OURS)
    aim = f"requests together at most {TOGETHER_OF_ALONE:g} of the same one after another"
    return _share(aim, together, alone, TOGETHER_OF_ALONE)


def _share(aim: str, ours: list[float], others: list[float], limit: float) -> Goal | None:
    """The median of the rounds' shares, with the lowest and the highest."""
    shares = [mine / other for mine, other in zip(ours, others, strict=False)]
    if not shares:
        return None
    share = statistics.median(shares)
    return Goal(
        aim=aim,
        result=f"{share:.2f} ({min(shares):.2f} to {max(shares):.2f})",
        met=share <= limit,
    )
