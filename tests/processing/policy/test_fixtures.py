"""Every tensor that LeRobot's processors made of the fixtures' observations, and their files."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from phalanx.processing.policy import (
    Surroundings,
    read_processors,
    resize_with_pad,
    to_policy_range,
    write_processors,
)
from tests.processing.policy.references import (
    PI,
    POLICIES,
    both,
    checkpoint,
    one,
    processor,
    stored,
    worst,
)


@pytest.mark.parametrize("name", PI)
def test_prompt_and_state_are_lerobots(name):
    seen, io = processor(name).prepare(both(name)).observation, stored(name)
    assert torch.equal(seen["observation.language.tokens"], io["pre.tokens"])
    assert torch.equal(seen["observation.language.attention_mask"], io["pre.token_mask"])
    assert torch.equal(seen["observation.state"], io["pre.state"])


@pytest.mark.parametrize("name", PI)
def test_the_prompts_text_is_lerobots(name):
    meta = json.loads((POLICIES / name / "meta.json").read_text())
    assert list(processor(name).prepare(both(name)).tasks) == meta["prompts"]


@pytest.mark.parametrize(
    ("name", "stored_name", "camera"),
    [
        ("pi05_micro_f32", "pre.image0", "front"),
        ("pi05_micro_f32", "pre.image1", "wrist"),
        ("pi05_tiny_f32", "pre.image0", "front"),
        ("pi0_tiny_f32", "pre.image0", "front"),
    ],
)
def test_resized_images_are_lerobots(name, stored_name, camera):
    wanted = stored(name)[stored_name]
    seen = processor(name).prepare(both(name)).observation[f"observation.images.{camera}"]
    made = to_policy_range(resize_with_pad(seen, *wanted.shape[-2:]))
    assert worst(made, wanted) <= 1
    smoothed = torch.nn.functional.interpolate(
        seen, made.shape[-2:], mode="bilinear", antialias=True
    )
    assert worst(to_policy_range(smoothed), wanted) > 1 or seen.shape == wanted.shape


def test_the_images_and_state_of_act_are_lerobots():
    seen, io = processor("act").prepare(both("act")).observation, stored("act")
    for name in ("observation.images.front", "observation.images.wrist", "observation.state"):
        assert worst(seen[name], io[f"pre.{name}"]) <= 1


@pytest.mark.parametrize("name", [*PI, "act"])
def test_actions_come_back_in_the_robots_units(name):
    io = stored(name)
    actions = processor(name).actions(io["out.normalized_actions"], both(name))
    assert worst(torch.from_numpy(actions.values), io["out.actions"]) <= 1
    single = processor(name).actions(io["out.normalized_actions"][:1], one(name))
    assert np.array_equal(single.values, actions.values[0])


@pytest.mark.parametrize("name", PI)
def test_what_a_policy_pads_its_actions_with_is_cut_off(name):
    io = stored(name)
    padded = torch.nn.functional.pad(io["out.normalized_actions"], (0, 25), value=9.0)
    actions = processor(name).actions(padded, both(name, horizon=3))
    assert actions.values.shape == (2, 3, 7)
    assert worst(torch.from_numpy(actions.values), io["out.actions"][:, :3]) <= 1


@pytest.mark.parametrize("name", [*PI, "act"])
def test_files_are_written_as_they_were_read(name, tmp_path):
    write_processors(processor(name).processors, tmp_path)
    source = checkpoint(name)
    for file in ("policy_preprocessor.json", "policy_postprocessor.json"):
        assert (tmp_path / file).read_text() == (source / file).read_text()
    for path in source.glob("policy_*.safetensors"):
        wanted, written = load_file(path), load_file(tmp_path / path.name)
        assert wanted.keys() == written.keys()
        assert all(torch.equal(wanted[key], written[key]) for key in wanted)
    again = read_processors(Surroundings(tmp_path, POLICIES / "pi05_micro_f32" / "tokenizer"))
    assert [step.config for step in again.before.steps] == [
        step.config for step in processor(name).processors.before.steps
    ]
