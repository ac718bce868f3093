"""The order of a step in a whole job whose roles take turns, from outside: what its control process
tells, and what its engines have been asked.
"""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.examples_rl.loop_under_test import Loop, loop
from tests.roles.control.whole_job import get

ROLES = ("rollout", "genrm", "teacher")
NUM_STEPS = 2


def urls(running: Loop) -> dict[str, str]:
    """Of the engines that run, by their roles."""
    found = {}
    for role in ROLES:
        models = get(f"{running.job.gateway_url}/{role}/engines")["models"]
        for engine in [engine for model in models.values() for engine in model["engines"]]:
            if engine["base_url"] is not None and engine["state"] in ("ready", "sleeping"):
                found[role] = engine["base_url"]
    return found


def num_asked(running: Loop) -> tuple[int, int, int]:
    """How many requests the engine of each role has finished in its life."""
    known, counts = urls(running), []
    for role in ROLES:
        text = ""
        if role in known:
            with urllib.request.urlopen(f"{known[role]}/metrics") as answer:
                text = answer.read().decode()
        counted = re.findall(r"^phalanx_requests_total\S* ([0-9.e+]+)$", text, re.M)
        counts.append(int(sum(map(float, counted))))
    rollout, genrm, teacher = counts
    return rollout, genrm, teacher


def changes(running: Loop) -> list[str]:
    """Every change of a state, a lease or a phase, one after the other."""
    events = get(f"{running.job.control_url}/v1/events?after=0")["events"]
    assert events[0]["number"] == 1, "all of them are kept"
    return [told(each) for each in events if each["kind"] in ("state", "lease", "phase")]


def told(event: dict[str, Any]) -> str:
    words = (event["role"], event.get("engine_id", ""), event["detail"])
    return " ".join(word for word in words if word)


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
def test_i91_i97_i98_i100_a_job_s_own_events_and_its_engines_have_the_order_of_the_rfc(
    models, tmp_path
):
    asked: dict[tuple[int, str], tuple[int, int, int]] = {}
    with loop("defer", models, tmp_path / "loop") as running:
        running.start_trainer(NUM_STEPS)
        while (event := running.event()) is not None:
            assert len(running.owners()) <= 1
            if event["event"] == "PhaseEntered" and event["phase"] in ROLES:
                shown = get(f"{running.job.gateway_url}/{event['phase']}/engines")
                assert shown["phase"] == event["phase"]
            if event["event"] == "SamplesDone" and event["done"] == event["total"]:
                asked[event["step"], event["what"]] = num_asked(running)
            if event["event"] == "StepTrained":
                assert running.owners() == {"trainer"}
                asked[event["step"], "train"] = num_asked(running)
            running.go_on()
        assert running.close_trainer() == 0, running.logs()[-4000:]
        found = changes(running)
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
