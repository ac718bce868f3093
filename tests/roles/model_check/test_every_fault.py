"""All that can go wrong in a small job, one thing or two at a time, at every call that it makes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest

from phalanx.testing.job_world import JobWorld
from phalanx.testing.job_world_faults import WorldFault
from tests.roles.model_check.living import SMALL, Case, live

Faults = Sequence[tuple[int, WorldFault]]
PAIRED = (
    WorldFault.LOST,
    WorldFault.LATE,
    WorldFault.CONTROL_ENDS_AFTER,
    WorldFault.DRIVER_ENDS,
)


@dataclass
class Explorer:
    """`states` are all that a job was ever seen in, at any call: what it shows, and what is true."""

    states: set[tuple[object, ...]] = field(default_factory=set)
    num_lives: int = 0

    def go(self, scripts: Iterable[Faults]) -> None:
        for faults in scripts:
            self.num_lives += 1
            lived = live(Case(SMALL, faults, look=self.look))
            assert lived.problems == [], faults

    def look(self, world: JobWorld) -> None:
        control, devices = world.control, world.devices
        shown: tuple[object, ...] = ()
        if control is not None:
            document = control.coordinator.document
            shown = (
                document.phase,
                document.batch,
                document.transition is None or document.transition.step,
                document.blocked is None,
                document.leases,
                document.trainer_holding,
                tuple(
                    (replica.engine_id, replica.state, replica.blocked)
                    for manager in control.managers.values()
                    for model in manager.registry.snapshot.content.models
                    for replica in model.replicas
                ),
            )
        true = tuple(sorted((one.launch.engine_id, *sorted(one.held)) for one in devices.resident))
        self.states.add((shown, true, devices.trainer_holds()))


def calls() -> list[str]:
    """Of an undisturbed life."""
    return live(Case(SMALL)).world.script.points


def singles(step: int) -> Iterable[Faults]:
    for kind, fault in enumerate(WorldFault):
        for at in range(kind % step, len(calls()), step):
            yield [(at, fault)]


def pairs(first: int, last: int) -> Iterable[Faults]:
    """Both between these two calls."""
    for one in PAIRED:
        for other in PAIRED:
            for at in range(first, last):
                for gap in range(last - at):
                    yield [(at, one), (gap, other)]


def test_d9_one_fault_at_every_17th_call(capsys):
    explorer = Explorer()
    explorer.go(singles(17))
    say(capsys, explorer)
    assert len(explorer.states) > 50


@pytest.mark.long
def test_d9_every_fault_at_every_call(capsys):
    explorer = Explorer()
    explorer.go(singles(1))
    say(capsys, explorer)
    assert explorer.num_lives > 800
    assert len(explorer.states) > 80


@pytest.mark.long
def test_d9_every_two_faults_while_one_phase_follows_another(capsys):
    points = calls()
    entered = [at for at, point in enumerate(points) if point == "http /v1/phases/enter"]
    explorer = Explorer()
    explorer.go(pairs(entered[1], entered[1] + 7))
    say(capsys, explorer)
    assert explorer.num_lives > 400


def say(capsys, explorer: Explorer) -> None:
    with capsys.disabled():
        print(f" [{explorer.num_lives} lives, {len(explorer.states)} states]", end="")
