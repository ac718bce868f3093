"""What is said about processor files that cannot be used, and about steps that are not known."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from phalanx.errors import CheckpointError
from phalanx.processing.policy import Surroundings, read_processors, write_processors
from tests.processing.policy.references import POLICIES, checkpoint

PRE = "policy_preprocessor.json"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoint"
    shutil.copytree(checkpoint("pi05_micro_f32"), directory)
    shutil.copytree(POLICIES / "pi05_micro_f32" / "tokenizer", directory / "tokenizer")
    return directory


def edit(directory: Path, change, file: str = PRE) -> None:
    content = json.loads((directory / file).read_text())
    change(content["steps"])
    (directory / file).write_text(json.dumps(content))


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        read_processors(Surroundings(directory))
    return str(error.value)


def test_an_unknown_step_is_refused_by_name(copied):
    added = {"registry_name": "grasp_planner", "config": {"radius": 3}}
    edit(copied, lambda steps: steps.insert(2, added))
    words = refusal(copied)
    assert f"{PRE}, step 2" in words and "'grasp_planner' is not known" in words


def test_the_class_of_an_unregistered_step_is_refused_by_name(copied):
    edit(copied, lambda steps: steps.append({"class": "robot.steps.Grasp", "config": {}}))
    assert "'robot.steps.Grasp' is not known" in refusal(copied)


def test_an_unknown_step_that_is_disabled_is_kept(copied, tmp_path):
    added = {"registry_name": "visual_memory", "config": {"enabled": False, "frames": 4}}
    edit(copied, lambda steps: steps.insert(2, added))
    processors = read_processors(Surroundings(copied))
    write_processors(processors, tmp_path / "again")
    written = json.loads((tmp_path / "again" / PRE).read_text())
    assert written["steps"][2] == added


def test_an_unknown_setting_is_refused_with_those_that_are_known(copied):
    edit(copied, lambda steps: steps[5]["config"].update(stride=3))
    words = refusal(copied)
    assert "step 5 (tokenizer_processor)" in words and "stride" in words
    assert "max_length" in words


def test_a_missing_file_is_named(copied):
    (copied / PRE).unlink()
    assert f"{PRE} does not exist" in refusal(copied)


def test_a_broken_file_is_named(copied):
    (copied / PRE).write_text("{")
    assert f"{PRE} is not a processor file" in refusal(copied)


def test_missing_statistics_are_named(copied):
    next(copied.glob("policy_preprocessor_*.safetensors")).unlink()
    assert "step 3: its tensors are in" in refusal(copied)


def test_tensors_outside_the_checkpoint_are_not_read(copied):
    edit(copied, lambda steps: steps[3].update(state_file="../secret.safetensors"))
    assert "must be a file of the checkpoint" in refusal(copied)


def test_relative_actions_without_what_they_are_relative_to_are_refused(copied):
    edit(
        copied,
        lambda steps: steps[1]["config"].update(enabled=True),
        file="policy_postprocessor.json",
    )
    edit(copied, lambda steps: steps.pop(2))
    assert "absolute_actions_processor) is enabled" in refusal(copied)
