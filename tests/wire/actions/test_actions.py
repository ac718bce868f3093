"""Both envelopes of `POST /v1/actions/generations`, and what is wrong with others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from phalanx.errors import InvalidRequestError, MalformedRequestError
from phalanx.schema.observation import Actions
from phalanx.wire.actions import (
    Envelope,
    decode_actions_request,
    encode_actions_response,
    error_body,
)
from phalanx.wire.msgpack_numpy import pack, unpack
from tests.wire.fuzzing import LONG_S, fuzz_for, mutations, outcome, taking_at_most

IMAGES = np.arange(2 * 4 * 6 * 3, dtype=np.uint8).reshape(2, 4, 6, 3)
OBSERVATION = {
    "main_images": IMAGES,
    "wrist_images": IMAGES[:, ::-1].copy(),
    "extra_view_images": np.stack([IMAGES, IMAGES], axis=1),
    "states": np.zeros((2, 8)),
    "task_descriptions": ["pick", "place"],
}
FLAT = {
    "model_name": "pi05",
    "observation": OBSERVATION,
    "metadata": {"episode": 3},
    "requested_action_horizon": 5,
}
RLINF = {
    "model": "pi05",
    "input": {"observation": OBSERVATION},
    "parameters": {"requested_action_horizon": 5, "num_steps": 4},
    "runtime": {"rank": 0},
}


def decode(value):
    return decode_actions_request(pack(value))


def test_the_flat_envelope():
    call = decode(FLAT)
    observation = call.observation
    assert (call.model_name, call.envelope) == ("pi05", Envelope.FLAT)
    assert list(observation.images) == [
        "main_images",
        "wrist_images",
        "extra_view_images_0",
        "extra_view_images_1",
    ]
    np.testing.assert_array_equal(observation.images["extra_view_images_1"], IMAGES)
    assert observation.state.shape == (2, 8)
    assert (observation.instructions, observation.batched) == (("pick", "place"), True)
    assert observation.horizon == 5


def test_the_envelope_of_rlinf():
    call = decode(RLINF)
    assert (call.model_name, call.envelope) == ("pi05", Envelope.RLINF)
    assert call.observation.horizon == 5
    assert call.observation.parameters == {"num_steps": 4}
    direct = decode({**RLINF, "input": OBSERVATION})
    assert list(direct.observation.images) == list(call.observation.images)


def test_a_single_observation_is_a_batch_of_one():
    call = decode(
        {
            "observation": {
                "main_images": IMAGES[0],
                "states": [1.0, 2.0],
                "task_descriptions": "pick",
            }
        }
    )
    assert call.model_name == ""
    assert call.observation.images["main_images"].shape == (1, 4, 6, 3)
    assert call.observation.state.shape == (1, 2)
    assert call.observation.instructions == ("pick",)


def test_one_task_is_for_all_rows():
    observation = {**OBSERVATION, "task_descriptions": ["pick"]}
    assert decode({"observation": observation}).observation.instructions == ("pick", "pick")


def test_parameters_may_have_arrays():
    left = np.arange(6, dtype=np.float32).reshape(3, 2)
    parameters = {"rtc": {"prev_actions": left, "parts": [left[0]]}, "num_steps": 3}
    got = decode({"observation": OBSERVATION, "parameters": parameters}).observation.parameters
    rtc = {"prev_actions": left.tolist(), "parts": [left[0].tolist()]}
    assert got == {"rtc": rtc, "num_steps": 3}


def test_extra_views_may_have_names():
    observation = {**OBSERVATION, "extra_view_images": {"left": IMAGES}}
    assert list(decode({"observation": observation}).observation.images)[-1] == "left"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"observation": None}, "observation is missing; send a map"),
        ({"observation": [1]}, "observation is list; send a map"),
        ({"model_name": 3}, "model_name must be one text"),
        ({"model": "pi0"}, "model_name and model must be one text"),
        ({"horizon": 3}, "unknown field 'horizon'"),
        ({"requested_action_horizon": -1}, "must be a positive integer"),
        ({"requested_action_horizon": True}, "must be a positive integer"),
        ({"requested_action_horizon": 1 << 40}, "must be a positive integer"),
        ({"observation": {"main_image": IMAGES}}, "unknown field 'observation.main_image'"),
        ({"observation": {"main_images": "x"}}, "main_images is str; send an array"),
        ({"observation": {"main_images": IMAGES[0, 0]}}, r"shape \(6, 3\); send \(B, H, W, C\)"),
        ({"observation": {"main_images": np.array(3, np.uint8)}}, r"shape \(\); send"),
        ({"observation": {"main_images": IMAGES.astype("i4")}}, "is int32; send uint8"),
        ({"observation": {"extra_view_images": IMAGES[0]}}, r"send \(B, views, H, W, C\)"),
        ({"observation": {"extra_view_images": np.zeros((1, 65, 1, 1, 1), "u1")}}, "has 65 views"),
        ({"observation": {"states": np.zeros((0, 8))}}, "0 instructions for a batch"),
        ({"observation": {"states": np.zeros((4097, 1))}}, "state has 4097 rows; at most 4096"),
        ({"observation": {"main_images": np.zeros((4097, 1, 1, 1), "u1")}}, "has 4097 rows"),
        ({"observation": {"states": np.zeros((1, 1, 8))}}, "the state has shape"),
        ({"observation": {"states": [["a"]]}}, "states is <U1; send numbers"),
        ({"observation": {**OBSERVATION, "task_descriptions": [1]}}, "must be a text, or a list"),
        ({"observation": {**OBSERVATION, "task_descriptions": []}}, "must be a text, or a list"),
        ({"observation": {**OBSERVATION, "states": np.zeros((3, 8))}}, "rows beside 2 instr"),
        ({"parameters": 3}, "parameters is int; send a map"),
    ],
)
def test_it_says_what_is_wrong(change, words):
    with pytest.raises(InvalidRequestError, match=words):
        decode({**FLAT, **change})


@pytest.mark.parametrize(
    "observation",
    [
        {"states": np.zeros((50_000_000, 0))},
        {"extra_view_images": np.zeros((1, 2_000_000, 0, 1, 1), np.uint8)},
    ],
)
def test_arrays_of_no_numbers_take_no_memory(observation):
    body = pack({"observation": observation})
    with taking_at_most(500_000), pytest.raises(InvalidRequestError, match="and no numbers"):
        decode_actions_request(body)


@pytest.mark.parametrize("body", [b"", b"\x93\x01", b"\xa4pi05", pack(FLAT)[:-1]])
def test_a_body_that_is_no_map_is_malformed(body):
    with pytest.raises(MalformedRequestError):
        decode_actions_request(body)


def test_answers_come_in_the_envelope_of_the_request():
    values = np.ones((2, 5, 7), np.float32)
    flat = unpack(encode_actions_response(Actions(values), Envelope.FLAT))
    np.testing.assert_array_equal(flat["actions"], values)
    rlinf = unpack(encode_actions_response(Actions(values), Envelope.RLINF))
    np.testing.assert_array_equal(rlinf["data"][0]["action"]["values"], values)
    single = unpack(encode_actions_response(Actions(values[0]), Envelope.FLAT))
    assert single["actions"].shape == (1, 5, 7)


def test_errors_are_json():
    assert error_body("invalid_request", "no") == (
        b'{"error":{"code":"invalid_request","message":"no"}}'
    )


MESSAGES = (pack(FLAT), pack(RLINF))


@settings(max_examples=80, derandomize=True, deadline=None)
@given(mutations(MESSAGES))
def test_whatever_arrives_is_decoded_or_refused(data):
    outcome(decode_actions_request, data)


@pytest.mark.long
def test_whatever_arrives_for_long_is_decoded_or_refused():
    fuzz_for(LONG_S, decode_actions_request, MESSAGES)
