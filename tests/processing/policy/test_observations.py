"""What an observation may be, and what a robot's operator is told of one that cannot be used."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from phalanx.errors import ConfigurationError, InvalidRequestError
from phalanx.processing.policy import (
    AdapterSettings,
    PolicyProcessor,
    adapter_settings,
    resize_with_pad,
)
from phalanx.processing.policy.stock_resize import stock_resize
from phalanx.schema.observation import Observation
from tests.processing.policy.references import POLICIES, both, checkpoint, one, pixels, processor

MICRO = "pi05_micro_f32"
TOKENIZER = str(POLICIES / MICRO / "tokenizer")


def made(**settings: object) -> PolicyProcessor:
    return PolicyProcessor.from_checkpoint(
        checkpoint(MICRO), AdapterSettings(tokenizer_dir=TOKENIZER, **settings)
    )


def test_a_row_of_a_batch_is_what_it_is_alone():
    whole = processor(MICRO).prepare(both(MICRO)).observation
    alone = processor(MICRO).prepare(one(MICRO, 1)).observation
    assert whole.keys() == alone.keys()
    assert all(torch.equal(whole[name][1], alone[name][0]) for name in whole)


def test_threads_do_not_see_each_others_observations():
    rng = np.random.default_rng(0)
    observations = [
        one(MICRO, images={"front": pixels(rng, 33, 47)}, state=rng.random(8, np.float32))
        for _ in range(8)
    ]
    wanted = [processor(MICRO).prepare(each) for each in observations]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(processor(MICRO).prepare, observations * 8))
    for index, each in enumerate(found):
        reference = wanted[index % 8]
        assert each.tasks == reference.tasks
        for name, value in reference.observation.items():
            assert torch.equal(each.observation[name], value)


def test_lerobots_own_server_stretches_images_first():
    rng = np.random.default_rng(0)
    image = pixels(rng, 60, 90)
    stock = one(MICRO, images={"front": image}, parameters={"lerobot": {}})
    seen = processor(MICRO).prepare(stock).observation["observation.images.front"]
    wanted = stock_resize(torch.from_numpy(image)[None], 33, 47)
    assert wanted.dtype == torch.uint8
    assert torch.equal(seen, wanted.float() / 255)
    plain = processor(MICRO).prepare(one(MICRO, images={"front": image})).observation
    assert plain["observation.images.front"].shape == (1, 3, 60, 90)


def test_images_may_be_views_that_nobody_may_write_to():
    image = pixels(np.random.default_rng(0), 33, 47)[::-1, ::-1]
    image.flags.writeable = False
    seen = processor(MICRO).prepare(one(MICRO, images={"front": image})).observation
    value = seen["observation.images.front"][0, :, 0, 0]
    assert torch.equal(value, torch.from_numpy(image[0, 0].copy()).float() / 255)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"images": {}}, "no image of front, wrist.*needs at least one"),
        ({"images": {"top": np.zeros((8, 8, 3), np.uint8)}}, "no camera 'top'.*'front', 'wrist'"),
        ({"images": {"front": np.zeros((8, 8, 1), np.uint8)}}, "'front' has 1 channels.*takes 3"),
        ({"state": None}, "no state; this policy takes 8 numbers"),
        ({"state": np.zeros(6, np.float32)}, "the state has 6 numbers; this policy takes 8"),
        ({"inputs": {"depth": np.zeros(4)}}, "no input 'depth'"),
    ],
)
def test_what_cannot_be_used_is_said_with_what_is_wanted(changed, words):
    with pytest.raises(InvalidRequestError, match=words):
        processor(MICRO).prepare(one(MICRO, **changed))


def test_images_of_another_size_are_refused_where_sizes_are_set():
    strict = PolicyProcessor.from_checkpoint(
        checkpoint(MICRO), AdapterSettings(tokenizer_dir=TOKENIZER), sizes=[(33, 47), (28, 28)]
    )
    strict.prepare(one(MICRO))
    with pytest.raises(InvalidRequestError, match=r"'wrist' is 8 x 9 .*takes 28 x 28"):
        strict.prepare(one(MICRO, images={"wrist": np.zeros((8, 9, 3), np.uint8)}))


def test_a_state_may_come_in_parts():
    parts = made(state_names=["joints", "gripper"])
    whole = one(MICRO)
    split = one(MICRO, state=None, inputs={"joints": whole.state[:7], "gripper": whole.state[7:]})
    assert parts.prepare(split).tasks == parts.prepare(whole).tasks
    with pytest.raises(InvalidRequestError, match="neither a state nor an input 'gripper'"):
        parts.prepare(one(MICRO, state=None, inputs={"joints": whole.state[:7]}))
    nan = {"joints": whole.state[:7], "gripper": np.full(1, np.nan, np.float32)}
    with pytest.raises(InvalidRequestError, match="not finite"):
        parts.prepare(one(MICRO, state=None, inputs=nan))


def test_a_batch_of_states_may_come_in_parts():
    parts = made(state_names=["joints", "gripper"])
    whole = both(MICRO)
    inputs = {"joints": whole.state[:, :7], "gripper": whole.state[:, 7:]}
    assert parts.prepare(both(MICRO, state=None, inputs=inputs)).tasks == parts.prepare(whole).tasks
    inputs["gripper"] = np.zeros((3, 1), np.float32)
    with pytest.raises(InvalidRequestError, match=r"'gripper' has shape \(3, 1\) beside 2 instr"):
        parts.prepare(both(MICRO, state=None, inputs=inputs))


def test_a_part_of_the_state_that_is_no_float32_is_not_finite():
    parts = made(state_names=["joints", "gripper"])
    inputs = {"joints": np.full(7, 1e300), "gripper": np.zeros(1, np.float32)}
    with pytest.raises(InvalidRequestError, match="not finite"):
        parts.prepare(one(MICRO, state=None, inputs=inputs))


@pytest.mark.parametrize("size", [(1, 1000), (1000, 1)])
def test_a_line_of_pixels_is_resized(size):
    fitted = resize_with_pad(torch.ones(1, 3, *size), 28, 28)
    assert fitted.shape == (1, 3, 28, 28)
    assert fitted.sum() == 3 * 28


def test_fewer_actions_may_be_the_robots():
    robot = made(action_dim=6)
    assert robot.info.action_dim == 6
    values = robot.actions(torch.zeros(1, 10, 32), one(MICRO)).values
    assert values.shape == (10, 6)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"state_dim": 6}, "state of 8 numbers"),
        ({"action_dim": 8}, "actions of 7 numbers"),
        ({"action_dim": 0}, "at least 1"),
        ({"image_names": ["a", "b", "c", "d"]}, "image_names"),
        ({"tokenizer_dir": "/nowhere"}, "tokenizer_dir"),
        ({"tokeniser_dir": "x"}, "tokeniser_dir.*known: tokenizer_dir"),
        ({"state_dim": "8"}, "state_dim"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, words):
    given = {"tokenizer_dir": TOKENIZER, **settings}
    with pytest.raises(ConfigurationError, match=words):
        PolicyProcessor.from_checkpoint(checkpoint(MICRO), adapter_settings(given))


def test_the_info_is_what_a_robot_sends_and_gets():
    info = made(image_names=["main_images", "wrist_images"]).info
    assert (info.cameras, info.state_dim) == (("main_images", "wrist_images"), 8)
    assert (info.policy, info.action_dim, info.horizon) == ("pi05", 7, 10)


def test_an_observation_without_instructions_has_an_empty_one():
    seen = processor(MICRO).prepare(Observation(images=one(MICRO).images, state=one(MICRO).state))
    assert seen.tasks[0].startswith("Task: , State: ")
