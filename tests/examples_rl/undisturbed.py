"""A run of the loop in `defer` in which nobody is killed, and what could be seen of it from outside."""

from __future__ import annotations

import re
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.models import Models

from tests.examples_rl.loop_under_test import Loop, loop
from tests.roles.control.whole_job import get

ROLES = ("rollout", "genrm", "teacher")
NUM_STEPS = 2

Counts = tuple[int, int, int]
"""Of each role, in the order of `ROLES`."""


@dataclass(frozen=True)
class Undisturbed:
    """`out` is what the trainer has written: it is the same in every placement. `asked`: how many
    requests each role's engine had finished in its life when this was done. `changes` are all of a
    state, a lease or a phase, one after the other.
    """

    out: Path
    asked: dict[tuple[int, str], Counts]
    changes: tuple[str, ...]


def run_undisturbed(models: Models, folder: Path) -> Undisturbed:
    """To its end; nobody ever shares the device."""
    asked: dict[tuple[int, str], Counts] = {}
    with loop("defer", models, folder) as running:
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
        assert running.num_trainers == 1
        (peak,) = running.job.ledger.peaks()
        assert 0 < peak <= running.job.ledger.budget_bytes
        return Undisturbed(folder / "out", asked, changes(running))


def num_asked(running: Loop) -> Counts:
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


def urls(running: Loop) -> dict[str, str]:
    """Of the engines that run, by their roles."""
    found = {}
    for role in ROLES:
        models = get(f"{running.job.gateway_url}/{role}/engines")["models"]
        for engine in [engine for model in models.values() for engine in model["engines"]]:
            if engine["base_url"] is not None and engine["state"] in ("ready", "sleeping"):
                found[role] = engine["base_url"]
    return found


def changes(running: Loop) -> tuple[str, ...]:
    events = get(f"{running.job.control_url}/v1/events?after=0")["events"]
    assert events[0]["number"] == 1, "all of them are kept"
    return tuple(told(each) for each in events if each["kind"] in ("state", "lease", "phase"))


def told(event: dict[str, Any]) -> str:
    words = (event["role"], event.get("engine_id", ""), event["detail"])
    return " ".join(word for word in words if word)
