"""The order of a step in a whole job whose roles take turns, from outside: what its control process
tells, and what its engines have been asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tests.examples_rl.undisturbed import NUM_STEPS


def in_this_order(found: Sequence[str], *expected: str) -> Iterator[str]:
    """What of `expected` does not come, each after the one before."""
    rest = iter(found)
    for words in expected:
        if not any(words == each for each in rest):
            yield words


def turn(role: str, engine: str, batch: str) -> list[str]:
    """What one role's turn on the device looks like."""
    return [
        f"enter {role!r} of batch {batch!r}: begun",
        f"{role} has the lease of node-0:0",
        f"{role} {engine} ready",
        f"enter {role!r} of batch {batch!r}: done",
    ]


def gone(role: str, engine: str) -> list[str]:
    return [f"{role} {engine} draining", f"{role} {engine} sleeping", f"{role} gave up node-0:0"]


@pytest.mark.long
def test_i91_i97_i98_i100_a_job_s_own_events_and_its_engines_have_the_order_of_the_rfc(undisturbed):
    asked, found = undisturbed.asked, undisturbed.changes
    # Four samples a step. No judge and no teacher is asked anything in a rollout, and nobody is
    # while the trainer has the device.
    assert asked == {
        (0, "collect"): (4, 0, 0),
        (0, "judge"): (4, 4, 0),
        (0, "teacher"): (4, 4, 4),
        (0, "train"): (4, 4, 4),
        (1, "collect"): (8, 4, 4),
        (1, "judge"): (8, 8, 4),
        (1, "teacher"): (8, 8, 8),
        (1, "train"): (8, 8, 8),
    }
    engines = {"rollout": "student/0", "genrm": "judge/0", "teacher": "whole/0"}
    for step in range(NUM_STEPS):
        batch = f"step-{step}"
        expected = []
        for role, engine in engines.items():
            begun, *rest = turn(role, engine, batch)
            before = {"rollout": None, "genrm": "rollout", "teacher": "genrm"}[role]
            expected += [begun, *(gone(before, engines[before]) if before else ()), *rest]
        expected += [
            f"enter 'train' of batch {batch!r}: begun",
            *gone("teacher", "whole/0"),
            "trainer has the lease of node-0:0",
            f"enter 'train' of batch {batch!r}: done",
            "trainer gave up node-0:0: the trainer holds nothing",
        ]
        assert list(in_this_order(found, *expected)) == [], found
