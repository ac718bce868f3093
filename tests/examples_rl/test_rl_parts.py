"""The demo's parts by themselves: a judge's grades, the student's checkpoint, the trainer, the picture."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
import torch
from rl.comparing import Record, differences
from rl.grading import judges_messages, reward
from rl.learner import Learner, LearnerSettings
from rl.models import keep_lower_layers
from rl.picture import draw
from rl.timeline import Change, Span, Timeline
from safetensors import safe_open

from phalanx.device_ledger import DeviceLedger, SimulatedDevice
from phalanx.distill import Sample, TeacherScores
from phalanx.errors import SimulatedOutOfMemoryError


def sample(number: int, grade: float = 0.5) -> Sample:
    ids = tuple(range(number + 3, number + 7))
    return Sample(
        sample_id=f"q/{number}",
        group_id="q",
        index=number,
        prompt_ids=(5, 6, 7),
        response_ids=ids,
        rollout_log_probs=(-1.0,) * 4,
        weight_versions=(("0", 4),),
        finish_reason="length",
        text=" an answer",
        reward=grade,
        metadata={"question": "Why?"},
        scores=TeacherScores(
            asked="", model=None, version=None, teacher_log_probs=(-0.5, -1.5, -2.0, -0.25)
        ),
    )


SAMPLES = [sample(number, number / 4) for number in range(4)]


@pytest.mark.parametrize(
    ("said", "worth"),
    [
        ("9", 1.0),
        (" I give it a 3 of 9", 3 / 9),
        ("The answer is incorrect", 0.0),
        ("It is not very good", 0.0),
        ("The sea is a noted place", 0.5),
        ("", 0.5),
    ],
)
def test_a_grade_is_the_first_digit_or_the_tone(said, worth):
    assert reward(said, SAMPLES[0]) == worth


def test_the_judge_reads_question_and_answer():
    (message,) = judges_messages(SAMPLES[0])
    assert "Question: Why?\nAnswer: an answer\n" in message["content"]


def test_a_student_is_the_lower_layers(models, tmp_path):
    source = Path(models.teacher)
    keep_lower_layers(source, tmp_path, 1)
    with (
        safe_open(source / "model.safetensors", "pt") as whole,
        safe_open(tmp_path / "model.safetensors", "pt") as lower,
    ):
        kept = {name for name in whole.keys() if "layers.1." not in name}
        assert set(lower.keys()) == kept
        assert all(torch.equal(lower.get_tensor(one), whole.get_tensor(one)) for one in kept)
    assert msgspec.json.decode((tmp_path / "config.json").read_bytes())["num_hidden_layers"] == 1
    assert (tmp_path / "tokenizer.json").exists()
    with pytest.raises(ValueError, match="num_layers=3 must be from 1 to 2"):
        keep_lower_layers(source, tmp_path, 3)


def learner(models, folder: Path, devices=()) -> Learner:
    return Learner(Path(models.student), folder, LearnerSettings(num_updates=2), devices)


def steps(made: Learner, first: int, last: int) -> None:
    for step in range(first, last):
        made.load()
        made.train(SAMPLES, step)
        made.save(step + 1)
        made.offload()


def weights(made: Learner) -> bytes:
    return (made.last().path / "model.safetensors").read_bytes()


def test_a_trainer_that_was_killed_goes_on_exactly(models, tmp_path):
    whole = learner(models, tmp_path / "whole")
    steps(whole, 0, 3)
    steps(learner(models, tmp_path / "killed"), 0, 2)
    killed = learner(models, tmp_path / "killed")
    killed.load()
    killed.train(SAMPLES, 2)  # and then it is killed, before it has saved
    (tmp_path / "killed" / ".step-0003.new").mkdir()
    again = learner(models, tmp_path / "killed")
    assert again.last().step == 2
    steps(again, 2, 3)
    assert weights(again) == weights(whole)
    assert weights(whole) != (Path(models.student) / "model.safetensors").read_bytes()


def test_only_as_many_checkpoints_are_kept_as_somebody_may_read(models, tmp_path):
    made = learner(models, tmp_path)
    steps(made, 0, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0002", "step-0003"]
    assert (made.last().step, made.last().version) == (3, "3")


def test_frozen_parts_stay(models, tmp_path):
    made = learner(models, tmp_path)
    steps(made, 0, 1)
    name = "model.embed_tokens.weight"
    with (
        safe_open(Path(models.student) / "model.safetensors", "pt") as before,
        safe_open(made.last().path / "model.safetensors", "pt") as after,
    ):
        assert torch.equal(before.get_tensor(name), after.get_tensor(name))


def test_memory_is_held_from_load_to_offload(models, tmp_path):
    ledger = DeviceLedger.create(tmp_path / "devices", 1, 8 << 20)
    made = learner(models, tmp_path / "steps", (SimulatedDevice(ledger, 0, "trainer"),))
    made.load()
    assert {one.tag for one in ledger.held()} == {"weights", "gradients", "optimizer"}
    made.train(SAMPLES, 0)
    assert {one.tag for one in ledger.held()} >= {"activations"}
    made.offload()
    assert ledger.held() == ()


def test_a_trainer_does_not_fit_beside_somebody(models, tmp_path):
    ledger = DeviceLedger.create(tmp_path / "devices", 1, 1 << 20)
    ledger.take(0, "rollout/student/0", "kv_cache", 1 << 20)
    made = learner(models, tmp_path / "steps", (SimulatedDevice(ledger, 0, "trainer"),))
    with pytest.raises(SimulatedOutOfMemoryError, match="rollout/student/0"):
        made.load()


def test_what_differs_is_named():
    record = Record(step=0, metrics={"loss": 1.0}, samples=tuple(SAMPLES))
    assert differences([record], [record]) == []
    graded = msgspec.structs.replace(SAMPLES[0], reward=0.125)
    other = msgspec.structs.replace(record, samples=(graded, *SAMPLES[1:]))
    assert differences([record], [other]) == ["rewards of step 1", "samples of step 1"]
    assert differences([record], []) == ["1 steps and 0"]


def test_the_picture_shows_phases_and_who_holds_what(tmp_path):
    seen = Timeline(
        num_devices=1,
        budget_bytes=100 << 20,
        spans=[Span("rollout", "step-0", 0.0, 2.0), Span("train", "step-0", 3.0, 4.0)],
        changes=[Change(0.0, 0, {"rollout": 60 << 20}), Change(2.5, 0, {"trainer": 90 << 20})],
        peaks=(90 << 20,),
        end_s=4.0,
    )
    file = draw({"defer": seen}, tmp_path / "made" / "timeline.svg")
    texts = [
        each.text for each in ElementTree.parse(file).iter() if each.text and each.text.strip()
    ]
    assert "defer: 1 x 100 MiB, 4 s" in texts
    assert {"rollout: 60 MiB", "trainer: 90 MiB", "rollout, step-0", "peak 90 MiB"} <= set(texts)
    assert seen.switches() == [("train", 1.0)]
