"""A timed observation as the policy gets it, and what its operator is told where it does not fit."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from phalanx.errors import BodyTooLargeError, InvalidRequestError
from phalanx.wire.lerobot import (
    blank_observation,
    decode_observation,
    decode_policy_instructions,
    to_observation,
)
from tests.wire.fuzzing import taking_at_most
from tests.wire.lerobot.pickles import config, features, observation

IMAGE = np.arange(72, dtype=np.uint8).reshape(4, 6, 3)
SENSORS = {"j0.pos": 0.5, "j1.pos": np.float32(1.5), "front": IMAGE, "task": "pick", "extra": 3}


def converted(sensors=SENSORS, **changed):
    instructions = decode_policy_instructions(config(**changed))
    return to_observation(instructions, decode_observation(observation(sensors)))


def test_images_state_and_task():
    made = converted()
    assert list(made.images) == ["front"]
    assert np.array_equal(made.images["front"], IMAGE)
    assert made.state.tolist() == [0.5, 1.5]
    assert made.instructions == ("pick",)
    assert made.horizon == 8


def test_settings_of_the_client_go_along():
    settings = converted().parameters["lerobot"]
    assert settings["policy_type"] == "pi05"
    assert settings["lerobot_features"]["observation.images.front"]["shape"] == [4, 6, 3]
    json.dumps(settings)


def test_cameras_have_their_names_after_the_renaming():
    made = converted(rename_map={"observation.images.front": "observation.images.base_0_rgb"})
    assert list(made.images) == ["base_0_rgb"]


def test_a_joint_may_be_an_array_of_one_number():
    assert converted({**SENSORS, "j0.pos": np.array([2.0])}).state[0] == 2.0


def test_a_robot_without_joints_has_no_state():
    declared = features(("front", (4, 6, 3)))
    del declared["observation.state"]
    assert converted(lerobot_features=declared).state is None


def test_the_order_of_the_state_is_the_declared_one():
    declared = features(("front", (4, 6, 3)))
    declared["observation.state"]["names"] = ["j1.pos", "j0.pos"]
    assert converted(lerobot_features=declared).state.tolist() == [1.5, 0.5]


@pytest.mark.parametrize("shapes", [((65536, 65536, 65536),), ((4096, 4096, 3),) * 3])
def test_images_that_are_too_large_are_refused_before_they_are_made(shapes):
    cameras = ((f"c{number}", shape) for number, shape in enumerate(shapes))
    instructions = decode_policy_instructions(config(lerobot_features=features(*cameras)))
    with (
        taking_at_most(1 << 20),
        pytest.raises(BodyTooLargeError, match="bytes; at most 104857600 are taken"),
    ):
        blank_observation(instructions)


def test_a_blank_observation_has_the_declared_shapes():
    blank = blank_observation(decode_policy_instructions(config()))
    assert blank.images["front"].shape == (4, 6, 3)
    assert blank.state.tolist() == [0.0, 0.0]


def without(name):
    return {key: value for key, value in SENSORS.items() if key != name}


@pytest.mark.parametrize(
    ("sensors", "words"),
    [
        (without("front"), "no camera 'front', which the robot declared; it has 'j0.pos'"),
        (without("j1.pos"), "no joint 'j1.pos'"),
        ({**SENSORS, "front": IMAGE.astype(np.float32)}, "sent float32 of shape"),
        ({**SENSORS, "front": IMAGE[:2]}, r"shape \(2, 6, 3\), not uint8 of shape \(4, 6, 3\)"),
        ({**SENSORS, "front": "no image"}, "'front' sent str"),
        ({**SENSORS, "j0.pos": math.nan}, "joint 'j0.pos' is nan"),
        ({**SENSORS, "j0.pos": math.inf}, "joint 'j0.pos' is inf"),
        ({**SENSORS, "j0.pos": 1e300}, "joint 'j0.pos' is 1e"),
        ({**SENSORS, "j0.pos": "0.5"}, "joint 'j0.pos' is no number"),
        ({**SENSORS, "j0.pos": np.zeros(2)}, "joint 'j0.pos' is no number"),
        ({**SENSORS, "task": 3}, "task is no text"),
    ],
)
def test_what_does_not_fit_is_named(sensors, words):
    with pytest.raises(InvalidRequestError, match=words):
        converted(sensors)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"timestamp": math.nan}, "timestamp is no finite number"),
        ({"timestamp": None}, "timestamp is no finite number"),
        ({"timestep": -1}, "timestep=-1 must be"),
        ({"timestep": 1.0}, "timestep is no integer"),
        ({"must_go": 1}, "must_go is neither true nor false"),
    ],
)
def test_times_are_checked(changed, words):
    with pytest.raises(InvalidRequestError, match=words):
        decode_observation(observation(SENSORS, **changed))
