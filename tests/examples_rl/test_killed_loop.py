"""Whoever is killed in whichever phase, the loop ends with the weights of an undisturbed one."""

from __future__ import annotations

from pathlib import Path

import pytest
from rl.comparing import differences, final_digest, records

from tests.examples_rl.loop_under_test import Event, Loop, loop
from tests.examples_rl.undisturbed import NUM_STEPS

PHASES = {"rollout": "collect", "genrm": "judge", "teacher": "teacher", "train": ""}
VICTIMS = ("control", "gateway", "trainer", "engine")
Kills = dict[tuple[int, str], tuple[str | None, str | None]]
"""Whom to kill, by the step and the phase of it: early in the phase, and late."""
KILLS: Kills = {
    (0, "rollout"): ("trainer", "gateway"),
    (0, "genrm"): ("engine", "trainer"),
    (0, "teacher"): ("engine", "gateway"),
    (0, "train"): ("engine", "trainer"),
    (1, "rollout"): ("engine", "control"),
    (1, "genrm"): ("gateway", "control"),
    (1, "teacher"): ("trainer", "control"),
    (1, "train"): ("gateway", "control"),
}
"""In the end everybody in every phase. An engine is killed early, where one runs for certain: a new job
starts none before its turn, and what is left to do may need none. So the student's is there, asleep,
in the first step's last phase.
"""
SPLIT_KILLS: Kills = {
    (0, "rollout"): ("control", None),
    (0, "teacher"): ("engine", None),
    (1, "genrm"): ("gateway", None),
    (1, "train"): (None, "trainer"),
}
"""Everybody once, where the trainer alone comes and goes."""


def is_the_moment(event: Event, step: int, phase: str, *, late: bool) -> bool:
    """In the middle of the phase: one of the samples is done, or more are; the trainer has its devices,
    or the step is trained and not saved.
    """
    if phase != "train":
        done = event["event"] == "SamplesDone" and (event["step"], event["what"], event["done"] > 1)
        return done == (step, PHASES[phase], late)
    if late:
        return event["event"] == "StepTrained" and event["step"] == step
    entered = event["event"] == "PhaseEntered" and (event["phase"], event["batch_id"])
    return entered == ("train", f"step-{step}")


def kill(running: Loop, victim: str, phase: str) -> None:
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
            running.start_trainer(NUM_STEPS)


def run(running: Loop, kills: Kills, *, takes_turns: bool) -> None:
    """To the end, with these kills; in defer nobody shares a device meanwhile."""
    left = {
        (*at, late): victim
        for at, victims in kills.items()
        for late, victim in zip((False, True), victims, strict=True)
        if victim is not None
    }
    running.start_trainer(NUM_STEPS)
    while True:
        event = running.event()
        if event is None:
            status = running.close_trainer()
            if status == 0:
                break
            pytest.fail(f"the trainer ended with {status}:\n{running.logs()[-8000:]}")
        if takes_turns:
            assert len(running.owners()) <= 1
        now = [at for at in left if is_the_moment(event, at[0], at[1], late=at[2])]
        if now:
            kill(running, left.pop(now[0]), now[0][1])
        else:
            running.go_on()
    assert not left


@pytest.mark.long
def test_the_loop_survives_every_kill_in_every_phase(models, undisturbed, tmp_path):
    assert {(phase, one) for (_, phase), victims in KILLS.items() for one in victims} == {
        (phase, victim) for phase in PHASES for victim in VICTIMS
    }
    with loop("defer", models, tmp_path / "loop") as running:
        run(running, KILLS, takes_turns=True)
        assert running.num_trainers == 1 + len(PHASES)
        assert "out of memory" not in running.logs()
    killed = tmp_path / "loop" / "out"
    assert differences(records(undisturbed.out), records(killed)) == []
    assert final_digest(undisturbed.out) == final_digest(killed)
    assert len(records(killed)) == NUM_STEPS == num_published(killed)


@pytest.mark.long
def test_the_loop_survives_a_kill_of_everybody_in_split_too(models, undisturbed, tmp_path):
    with loop("split", models, tmp_path / "loop") as running:
        run(running, SPLIT_KILLS, takes_turns=False)
        assert running.num_trainers == 2
        assert "out of memory" not in running.logs()
    killed = tmp_path / "loop" / "out"
    assert differences(records(undisturbed.out), records(killed)) == []
    assert len(records(killed)) == NUM_STEPS == num_published(killed)


def num_published(folder: Path) -> int:
    return len(list((folder / "batches").glob("*.published")))
