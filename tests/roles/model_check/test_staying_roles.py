"""A role that stays, whatever ends: no phase is shown before it serves, and whoever waits for it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from phalanx.roles.coordination.tenants import RoleTenant
from phalanx.testing.job_world import JobLayout, WorldParts
from phalanx.testing.job_world_faults import WorldFault
from tests.roles.model_check.living import MIXED, Case, live

STAYING = [MIXED, replace(MIXED, lasting=False)]


class PresentTenant(RoleTenant):
    """Says that it serves, whatever is true."""

    def absence(self) -> None:
        return None


def problems(layout: JobLayout, step: int) -> list[str]:
    """Of lives with one fault each, at every `step`-th call."""
    cases: list[Sequence[tuple[int, WorldFault]]] = []
    calls = live(Case(layout)).world.script.points
    for kind, fault in enumerate(WorldFault):
        cases += [[(at, fault)] for at in range(kind % step, len(calls), step)]
    return [
        f"{faults}: {problem}"
        for faults in cases
        for problem in live(Case(layout, faults)).problems
    ]


@pytest.mark.parametrize("layout", STAYING, ids=["lasting", "mortal"])
def test_i91_one_fault_now_and_then_keeps_nobody_waiting(layout):
    assert problems(layout, 97) == []


@pytest.mark.long
@pytest.mark.parametrize("layout", STAYING, ids=["lasting", "mortal"])
def test_i91_no_fault_at_any_call_keeps_anybody_waiting_for_ever(layout):
    assert problems(layout, 7) == []


@pytest.mark.parametrize("path", ["deactivate", "drain", "recover"])
def test_a_role_that_an_operator_takes_away_while_it_is_needed_is_brought_back(path):
    assert live(meddled(path)).problems == []


def test_a_coordinator_that_does_not_look_is_found_out():
    lived = live(replace(meddled("drain"), parts=WorldParts(tenant=PresentTenant)))
    assert "phase teacher is shown, and teacher is draining" in lived.problems


def meddled(path: str) -> Case:
    body = {"engine_id": "teacher/0"} if path == "recover" else {}
    return Case(MIXED, meddling=[(1.0, "POST", f"/v1/roles/teacher/{path}", body)])
