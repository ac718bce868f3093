"""Actions relative to the state, added again after the policy."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from phalanx.errors import CheckpointError
from phalanx.processing.policy import AdapterSettings, PolicyProcessor
from phalanx.processing.policy.relative import RelativeActions, RelativeSettings
from tests.processing.policy.references import POLICIES, both, checkpoint, processor, stored

NAMES = ["shoulder", "elbow", "Gripper.pos", "wrist", "a", "b", "c"]
TOKENIZER = str(POLICIES / "pi05_micro_f32" / "tokenizer")


@pytest.fixture
def relative(tmp_path) -> PolicyProcessor:
    """The micro policy, as if it had been trained on relative actions."""
    directory = tmp_path / "checkpoint"
    shutil.copytree(checkpoint("pi05_micro_f32"), directory)
    for file, index, more in (
        ("policy_preprocessor.json", 2, {"action_names": NAMES}),
        ("policy_postprocessor.json", 1, {}),
    ):
        content = json.loads((directory / file).read_text())
        content["steps"][index]["config"].update(enabled=True, **more)
        (directory / file).write_text(json.dumps(content))
    return PolicyProcessor.from_checkpoint(directory, AdapterSettings(tokenizer_dir=TOKENIZER))


def test_the_state_is_added_but_to_the_joints_that_stay_absolute(relative):
    output, observation = stored("pi05_micro_f32")["out.normalized_actions"], both("pi05_micro_f32")
    plain = processor("pi05_micro_f32").actions(output, observation).values
    added = relative.actions(output, observation).values - plain
    wanted = observation.state[:, None, :7].repeat(10, 1)
    wanted[..., 2] = 0
    assert np.allclose(added, wanted, atol=1e-4)


def test_earlier_actions_become_what_the_policy_gave(relative):
    output, observation = stored("pi05_micro_f32")["out.normalized_actions"], both("pi05_micro_f32")
    actions = torch.from_numpy(relative.actions(output, observation).values)
    assert torch.allclose(relative.normalized_actions(actions, observation), output, atol=1e-4)


def test_without_names_every_joint_is_relative():
    step = RelativeActions(RelativeSettings(enabled=True, exclude_joints=["gripper"]))
    offset = step.offset(torch.tensor([[1.0, 2.0, 3.0]]), torch.zeros(1, 4, 2))
    assert offset.tolist() == [[[1.0, 2.0]]]


def test_a_state_that_is_too_short_is_refused():
    step = RelativeActions(RelativeSettings(enabled=True))
    with pytest.raises(CheckpointError, match="7 numbers are relative to a state of 3"):
        step.offset(torch.zeros(1, 3), torch.zeros(1, 7))
