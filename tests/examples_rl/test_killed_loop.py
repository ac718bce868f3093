"""Whoever is killed in whichever phase, the loop ends with the weights of an undisturbed one."""

from __future__ import annotations

from pathlib import Path

import pytest
from rl.comparing import differences, final_digest, records

from tests.examples_rl.loop_under_test import Event, Loop, loop

PHASES = {"rollout": "collect", "genrm": "judge", "teacher": "teacher", "train": ""}
VICTIMS = ("control", "gateway", "trainer", "engine")
Kills = dict[tuple[int, str], str]
"""Whom to kill, by the step and the phase of it."""
KILLS: Kills = {
    (step, phase): VICTIMS[(step + at) % len(VICTIMS)]
    for step in range(len(VICTIMS))
    for at, phase in enumerate(PHASES)
}
"""One in each phase of each step: in the end everybody in every phase. The order leaves the student's
engine running, asleep, where it is killed in the trainer's phase: a new job starts none before its turn.
"""
SPLIT_KILLS: Kills = {
    (0, "rollout"): "control",
    (0, "teacher"): "engine",
    (1, "genrm"): "gateway",
    (1, "train"): "trainer",
}
"""Everybody once, where the trainer alone comes and goes."""
NUM_STEPS, NUM_SPLIT_STEPS = len(VICTIMS), 2


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


def run(running: Loop, num_steps: int, kills: Kills, *, takes_turns: bool) -> None:
    """To the end, with these kills; in defer nobody shares a device meanwhile."""
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
        now = [at for at in left if at[0] == event.get("step") and is_the_moment(event, at[1])]
        if now:
            kill(running, left.pop(now[0]), now[0][1], num_steps)
        else:
            running.go_on()
    assert not left


@pytest.fixture(scope="module")
def undisturbed(models, tmp_path_factory):
    """What the trainer has written of a run in which nobody was killed: it is the same in every
    placement.
    """
    folder = tmp_path_factory.mktemp("undisturbed") / "loop"
    with loop("defer", models, folder) as running:
        run(running, NUM_STEPS, {}, takes_turns=True)
        assert running.num_trainers == 1
        (peak,) = running.job.ledger.peaks()
        assert 0 < peak <= running.job.ledger.budget_bytes
    return folder / "out"


@pytest.mark.long
def test_the_loop_survives_every_kill_in_every_phase(models, undisturbed, tmp_path):
    assert {(phase, victim) for (_, phase), victim in KILLS.items()} == {
        (phase, victim) for phase in PHASES for victim in VICTIMS
    }
    with loop("defer", models, tmp_path / "loop") as running:
        run(running, NUM_STEPS, KILLS, takes_turns=True)
        assert running.num_trainers == 1 + len(PHASES)
        assert "out of memory" not in running.logs()
    killed = tmp_path / "loop" / "out"
    assert differences(records(undisturbed), records(killed)) == []
    assert final_digest(undisturbed) == final_digest(killed)
    assert len(records(killed)) == NUM_STEPS == num_published(killed)


@pytest.mark.long
def test_the_loop_survives_a_kill_of_everybody_in_split_too(models, undisturbed, tmp_path):
    with loop("split", models, tmp_path / "loop") as running:
        run(running, NUM_SPLIT_STEPS, SPLIT_KILLS, takes_turns=False)
        assert running.num_trainers == 2
        assert "out of memory" not in running.logs()
    killed = tmp_path / "loop" / "out"
    assert differences(records(undisturbed)[:NUM_SPLIT_STEPS], records(killed)) == []
    assert len(records(killed)) == NUM_SPLIT_STEPS == num_published(killed)


def num_published(folder: Path) -> int:
    return len(list((folder / "batches").glob("*.published")))
