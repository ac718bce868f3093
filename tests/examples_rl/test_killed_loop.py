"""Whoever is killed in whichever phase, the loop ends with the weights of an undisturbed one."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from rl.comparing import differences, final_digest, records

from tests.examples_rl.loop_under_test import Event, Loop, loop

PHASES = {"rollout": "collect", "genrm": "judge", "teacher": "teacher", "train": ""}
VICTIMS = ("control", "gateway", "engine", "trainer")
KILLS = dict(enumerate(itertools.product(PHASES, VICTIMS)))
"""A kill in each step: everybody in every phase, where devices are shared by turns."""


def is_the_moment(event: Event, phase: str) -> bool:
    """In the middle of the phase: one of the samples is done, or the step is trained and not saved."""
    if phase == "train":
        return event["event"] == "StepTrained"
    return event["event"] == "SamplesDone" and (event["what"], event["done"]) == (PHASES[phase], 1)


def kill(running: Loop, victim: str, phase: str, num_steps: int) -> None:
    match victim:
        case "control":
            running.kill_control()
            running.go_on()
            running.start_job()
        case "gateway":
            running.kill_gateway()
            running.go_on()
        case "engine":
            running.kill_engine("rollout" if phase == "train" else phase)
            running.go_on()
        case "trainer":
            running.kill_trainer()
            running.start_trainer(num_steps)


def run(
    running: Loop, num_steps: int, kills: dict[int, tuple[str, str]], *, takes_turns: bool
) -> None:
    """To the end, with a kill at each of these steps; in defer nobody shares a device meanwhile."""
    left = dict(kills)
    running.start_trainer(num_steps)
    while True:
        event = running.event()
        if event is None:
            status = running.close_trainer()
            if status == 0:
                break
            pytest.fail(f"the trainer ended with {status}:\n{running.logs()[-8000:]}")
        if takes_turns:
            assert len(running.owners()) <= 1
        step = event.get("step")
        if step in left and is_the_moment(event, left[step][0]):
            phase, victim = left.pop(step)
            kill(running, victim, phase, num_steps)
        else:
            running.go_on()
    assert not left


@pytest.fixture(scope="module")
def undisturbed(models, tmp_path_factory):
    """What the trainer has written of a run in which nobody was killed."""
    folder = tmp_path_factory.mktemp("undisturbed") / "loop"
    with loop("defer", models, folder) as running:
        run(running, len(KILLS), {}, takes_turns=True)
        assert running.num_trainers == 1
        (peak,) = running.job.ledger.peaks()
        assert 0 < peak <= running.job.ledger.budget_bytes
    return folder / "out"


@pytest.mark.long
def test_the_loop_survives_every_kill_in_every_phase(models, undisturbed, tmp_path):
    with loop("defer", models, tmp_path / "loop") as running:
        run(running, len(KILLS), KILLS, takes_turns=True)
        assert running.num_trainers == 1 + len(PHASES)
        assert "out of memory" not in running.logs()
    killed = tmp_path / "loop" / "out"
    assert differences(records(undisturbed), records(killed)) == []
    assert final_digest(undisturbed) == final_digest(killed)
    assert len(records(killed)) == len(KILLS) == num_published(killed)


def num_published(folder: Path) -> int:
    return len(list((folder / "batches").glob("*.published")))
