"""The observations of openpi's example robots, and what cannot be one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from phalanx.errors import InvalidRequestError, MalformedRequestError
from phalanx.schema.observation import Actions
from phalanx.wire.msgpack_numpy import pack, unpack
from phalanx.wire.openpi import decode_observation, encode_metadata, encode_result
from tests.wire.fuzzing import LONG_S, fuzz_for, mutations, outcome, taking_at_most

IMAGE = np.arange(8 * 6 * 3, dtype=np.uint8).reshape(8, 6, 3)
LIBERO = {
    "observation/image": IMAGE,
    "observation/wrist_image": IMAGE[::-1].copy(),
    "observation/state": np.arange(8) / 8,
    "prompt": "pick",
}
DROID = {
    "observation/exterior_image_1_left": IMAGE,
    "observation/wrist_image_left": IMAGE,
    "observation/joint_position": np.arange(7.0),
    "observation/gripper_position": np.array([0.5]),
    "prompt": "pick",
}
ALOHA = {
    "state": np.ones(14),
    "images": {"cam_high": np.moveaxis(IMAGE, -1, 0), "cam_low": np.moveaxis(IMAGE, -1, 0)},
    "prompt": "pick",
}


def decode(value):
    return decode_observation(pack(value))


def test_libero():
    got = decode(LIBERO)
    assert list(got.images) == ["image", "wrist_image"]
    np.testing.assert_array_equal(got.images["image"], IMAGE)
    assert got.state.dtype == np.float32
    assert got.state.tolist() == LIBERO["observation/state"].tolist()
    assert (got.instructions, got.batched) == (("pick",), False)
    assert (got.inputs, got.parameters) == ({}, {})


def test_droid_has_its_state_in_two_parts():
    got = decode(DROID)
    assert list(got.images) == ["exterior_image_1_left", "wrist_image_left"]
    assert got.state.tolist() == [0, 1, 2, 3, 4, 5, 6, 0.5]
    scalar = decode({**DROID, "observation/gripper_position": 0.5})
    assert scalar.state.tolist() == got.state.tolist()


def test_aloha_nests_its_images_with_channels_first():
    got = decode(ALOHA)
    assert list(got.images) == ["cam_high", "cam_low"]
    np.testing.assert_array_equal(got.images["cam_high"], IMAGE)
    assert got.state.shape == (14,)


def test_keys_of_lerobot_lose_their_prefix():
    got = decode({"observation.images.top": IMAGE, "observation.state": [1, 2.5]})
    assert list(got.images) == ["top"]
    assert got.state.tolist() == [1, 2.5]
    assert got.instructions == ("",)


def test_float_images_are_scaled():
    got = decode({"image": np.full((4, 4, 3), 0.5, np.float32)})
    assert got.images["image"].dtype == np.uint8
    assert got.images["image"].max() == 127


def test_a_batch_has_one_prompt_a_row_or_one_for_all():
    images = np.stack([IMAGE, IMAGE])
    got = decode({"image": images, "state": np.zeros((2, 3)), "prompt": ["a", "b"]})
    assert (got.batched, got.instructions) == (True, ("a", "b"))
    assert decode({"image": images, "prompt": "a"}).instructions == ("a", "a")


def test_what_else_is_sent_is_kept():
    got = decode({"state": [0.0], "mask": np.array([True]), "num_steps": 5, "rtc": {"delay": 1}})
    assert got.inputs["mask"].tolist() == [True]
    assert got.parameters == {"num_steps": 5, "rtc": {"delay": 1}}


def test_settings_may_have_arrays():
    left = np.arange(6, dtype=np.float32).reshape(3, 2)
    got = decode({"state": [0.0], "rtc": {"prev_chunk_left_over": left, "inference_delay": 1}})
    assert got.parameters == {"rtc": {"prev_chunk_left_over": left.tolist(), "inference_delay": 1}}
    assert not got.inputs


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"rtc": {"prev_actions": np.zeros(65_537, "u1")}}, "arrays of 65537 numbers"),
        ([1], "the frame is list"),
        ({"state": ["a"]}, "state is <U1; send numbers"),
        ({"state": [[1], [1, 2]]}, "state is no array"),
        ({"state": [float("nan")]}, "the state is not finite at index 0"),
        ({"state": [1e300]}, "the state is not finite at index 0"),
        ({"image": IMAGE.astype(np.int64)}, "image 'image' is int64; send uint8"),
        ({"image": IMAGE.astype(np.float32)}, "not within 0 to 1"),
        ({"image": np.full((2, 2, 3), np.nan)}, "not within 0 to 1"),
        ({"prompt": 3}, "prompt is int; send a text"),
        ({"prompt": ["a", 1]}, "prompt is list; send a text"),
        ({"state": [1.0], "observation/state": [1.0]}, "is there twice, as 'state'"),
        ({"image": np.stack([IMAGE, IMAGE]), "prompt": ["a"]}, "has 2 rows beside 1 instr"),
        ({"state": np.zeros((4097, 1))}, "state has 4097 rows; at most 4096"),
        ({"state": np.zeros((50_000_000, 0))}, "state has shape .* and no numbers"),
        ({"joint_position": np.zeros((2, 3)), "gripper_position": [0.0]}, "do not fit"),
    ],
)
def test_it_says_what_is_wrong(value, words):
    with pytest.raises(InvalidRequestError, match=words):
        decode(value)


def test_names_of_parts_are_not_copied_into_those_of_many_values():
    part = {f"a{index}": 1 for index in range(2000)}
    part["z"] = np.zeros(1)
    for depth in range(8):
        part = {f"{depth}" * 250: part}
    frame = pack(part)
    with (
        taking_at_most(1_000_000),
        pytest.raises(InvalidRequestError, match="more than 256 characters"),
    ):
        decode_observation(frame)


def test_bytes_that_are_no_frame_are_refused():
    with pytest.raises(MalformedRequestError, match="ends within a value"):
        decode_observation(pack(LIBERO)[:-3])


def test_results_are_what_the_client_expects():
    actions = Actions(np.ones((5, 7), np.float32), {"values": np.zeros(5)})
    got = unpack(encode_result(actions, infer_ms=1.0, server_ms=2.0, previous_ms=3.0))
    np.testing.assert_array_equal(got["actions"], actions.values)
    assert got["values"].shape == (5,)
    assert got["policy_timing"] == {"infer_ms": 1.0}
    assert got["server_timing"] == {"infer_ms": 2.0, "prev_total_ms": 3.0}
    first = unpack(encode_result(actions, infer_ms=1.0, server_ms=2.0))
    assert first["server_timing"] == {"infer_ms": 2.0}
    assert unpack(encode_metadata({"cameras": ["a"]})) == {"cameras": ["a"]}


MESSAGES = tuple(pack(value) for value in (LIBERO, DROID, ALOHA))


@settings(max_examples=80, derandomize=True, deadline=None)
@given(mutations(MESSAGES))
def test_whatever_arrives_is_decoded_or_refused(data):
    outcome(decode_observation, data)


@pytest.mark.long
def test_whatever_arrives_for_long_is_decoded_or_refused():
    fuzz_for(LONG_S, decode_observation, MESSAGES)
