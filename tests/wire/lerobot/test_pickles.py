"""Recorded and made pickles decode to what Python's own unpickler makes of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phalanx.wire.lerobot import (
    decode_actions,
    decode_observation,
    decode_policy_instructions,
    encode_actions,
)
from tests.wire.lerobot.pickles import (
    CURRENT,
    EARLIER,
    config,
    dumped,
    observation,
    recorded,
    trusted,
)


def same(ours, theirs):
    if isinstance(theirs, torch.Tensor):
        theirs = theirs.float().numpy() if theirs.dtype == torch.bfloat16 else theirs.numpy()
    if isinstance(theirs, np.ndarray):
        assert ours.dtype == theirs.dtype.newbyteorder("=")
        assert np.array_equal(ours, theirs)
    else:
        assert ours == theirs


@pytest.mark.parametrize(
    "name",
    ["timed_observation_480p_x2", "timed_observation_variants", "timed_observation_variants_p5"],
)
def test_recorded_observations(name):
    data = recorded(name)
    ours, theirs = decode_observation(data), trusted(data)
    assert (ours.timestamp_s, ours.timestep) == (theirs.timestamp, theirs.timestep)
    assert ours.must_go == theirs.must_go
    assert list(ours.sensors) == list(theirs.observation)
    for key, value in theirs.observation.items():
        same(ours.sensors[key], value)


def test_recorded_policy_instructions():
    data = recorded("remote_policy_config")
    ours, theirs = decode_policy_instructions(data), trusted(data)
    assert ours.policy_type == theirs.policy_type
    assert ours.model == theirs.pretrained_name_or_path
    assert ours.actions_per_chunk == theirs.actions_per_chunk
    assert (ours.device, ours.rename_map) == (theirs.device, theirs.rename_map)
    state = theirs.lerobot_features["observation.state"]
    assert ours.features.state_names == tuple(state["names"])
    assert [camera.name for camera in ours.features.cameras] == ["front", "wrist"]
    assert all(camera.shape == (480, 640, 3) for camera in ours.features.cameras)


@pytest.mark.parametrize("name", ["actions_50x6", "actions_50x32", "actions_100x14"])
def test_recorded_actions(name):
    data = recorded(name)
    theirs = trusted(data)
    ours = decode_actions(data)
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs, strict=True):
        assert (our.timestamp_s, our.timestep) == (their.timestamp, their.timestep)
        same(our.values, their.action)


SENSORS = {
    "strided": np.arange(48, dtype=np.uint8).reshape(4, 4, 3)[::2, ::-1],
    "fortran": np.asfortranarray(np.arange(24, dtype=np.uint8).reshape(2, 4, 3)),
    "empty": np.zeros((0, 3), np.float32),
    "big-endian": np.arange(5, dtype=">f8"),
    "half": np.arange(4, dtype=np.float16),
    "mask": np.array([True, False]),
    "zero-dimensional": np.array(2.5, np.float32),
    "numpy number": np.float64(1.25),
    "numpy bool": np.bool_(True),
    "integer": 7,
    "large integer": 1 << 70,
    "flag": True,
    "text": "pick up the cube \N{ROBOT FACE}",
    "tensor": torch.arange(6.0),
    "rows of a tensor": torch.arange(12.0).reshape(3, 4)[1],
    "transposed tensor": torch.arange(6, dtype=torch.int64).reshape(2, 3).T,
    "bfloat16": torch.arange(4.0, dtype=torch.bfloat16),
    "bool tensor": torch.tensor([True, False]),
    "byte tensor": torch.zeros(0, dtype=torch.uint8),
}


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("name", SENSORS)
def test_every_kind_of_sensor(name, protocol):
    value = SENSORS[name]
    data = observation({"x": value, "again": value}, protocol=protocol)
    ours = decode_observation(data)
    same(ours.sensors["x"], value)
    same(ours.sensors["again"], value)


def test_protocol_2_is_read_where_it_needs_no_text_codec():
    data = observation({"j.pos": 1.5, "task": "x"}, protocol=2)
    assert decode_observation(data).sensors == {"j.pos": 1.5, "task": "x"}


@pytest.mark.parametrize("module", [CURRENT, EARLIER])
def test_answers_name_the_module_that_the_client_named(module):
    instructions = decode_policy_instructions(config(module=module))
    assert instructions.module == module
    answer = encode_actions(np.zeros((2, 3), np.float32), 1.0, 5, 30.0, instructions.module)
    other = EARLIER if module == CURRENT else CURRENT
    assert module.encode() in answer
    assert other.encode() not in answer


@pytest.mark.parametrize(("horizon", "width"), [(1, 1), (50, 6), (50, 32), (100, 14), (200, 300)])
@pytest.mark.parametrize("timestep", [0, 200, 70_000, (1 << 31) - 2])
def test_encoded_actions_are_what_torch_reads(horizon, width, timestep):
    values = np.random.default_rng(1).standard_normal((horizon, width), np.float32)
    answer = encode_actions(values, 1234.5, timestep, 25.0, CURRENT)
    theirs = trusted(answer)
    for index, (action, row) in enumerate(zip(theirs, values, strict=True)):
        assert torch.equal(action.action, torch.from_numpy(row))
        assert action.timestep == timestep + index
        assert action.timestamp == 1234.5 + index / 25.0
    assert theirs[0].action.device.type == "cpu"
    assert isinstance(theirs[-1].action[width - 1].item(), float)
    ours = decode_actions(answer)
    assert all(np.array_equal(our.values, row) for our, row in zip(ours, values, strict=True))


def test_the_answer_of_no_actions_is_an_empty_list():
    answer = encode_actions(np.zeros((0, 7), np.float32), 1.0, 0, 30.0, CURRENT)
    assert trusted(answer) == []


def test_encoded_actions_share_one_storage():
    values = np.ones((50, 32), np.float32)
    theirs = trusted(encode_actions(values, 0.0, 0, 30.0, CURRENT))
    assert len({action.action.untyped_storage().data_ptr() for action in theirs}) == 1


def test_images_are_views_of_what_was_sent():
    data = observation({"front": np.zeros((4, 6, 3), np.uint8)})
    image = decode_observation(data).sensors["front"]
    assert not image.flags.owndata
    assert not image.flags.writeable


def test_a_record_of_another_kind_is_named():
    made = dumped(lambda classes: classes.TimedAction(1.0, 0, None))
    with pytest.raises(ValueError, match="TimedAction"):
        decode_observation(made)
