"""What is sent arrives: requests, answers and the small messages, and the committed descriptors."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool

from phalanx.errors import InvalidRequestError, MalformedRequestError
from phalanx.schema.observation import Actions, Observation
from phalanx.wire import robot_inference as wire
from phalanx.wire.robot_inference.messages import REQUEST
from tests.wire.robot_inference.observations import (
    assert_same,
    batch,
    image,
    request_message,
    single,
)

ROOT = Path(__file__).parents[3]


def test_the_committed_descriptors_are_those_of_the_proto_files():
    script = runpy.run_path(str(ROOT / "scripts" / "protocols.py"))
    parse = descriptor_pb2.FileDescriptorSet.FromString
    for folder in script["protocol_folders"]():
        committed = (folder / script["DESCRIPTORS"]).read_bytes()
        assert parse(committed) == parse(script["compiled"](folder)), (
            "run: python scripts/protocols.py"
        )


def test_arrays_among_the_parameters_arrive_as_lists():
    left = np.arange(6, dtype=np.float32).reshape(3, 2)
    sent = Observation(parameters={"rtc": {"prev_chunk_left_over": left, "delay": np.int64(2)}})
    got = wire.decode_request(wire.encode_request(wire.InferenceCall("r-1", "pi05", sent)))
    rtc = {"prev_chunk_left_over": left.tolist(), "delay": 2}
    assert got.observation.parameters == {"rtc": rtc}


@pytest.mark.parametrize("call", [single(), batch()], ids=["single", "batch"])
def test_a_request_arrives_as_it_was_sent(call):
    got = wire.decode_request(wire.encode_request(call))
    assert (got.request_id, got.model_name, got.timestamp_ns) == (
        call.request_id,
        call.model_name,
        call.timestamp_ns,
    )
    assert_same(got.observation, call.observation)


def test_field_numbers_are_those_of_the_protocol():
    data = wire.encode_request(single())
    fields = {field.number for field in REQUEST._cls.DESCRIPTOR.fields}
    assert fields == set(range(1, 10))
    assert data.startswith(b"\x0a\x03r-1"), "request_id is field 1"
    assert wire.peek(b"\x42\x04pi05\x0a\x01x") == wire.RequestHead("x", "pi05")


def test_the_messages_are_in_no_pool_that_others_share():
    assert REQUEST.new() is not None
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindMessageTypeByName("robot.inference.v1.InferenceRequest")


def test_a_jpeg_comes_back_close_and_is_smaller():
    call = wire.InferenceCall("r", "m", Observation(images={"base": image(64, 96)}))
    data = wire.encode_request(call, jpeg_quality=95)
    got = wire.decode_request(data).observation.images["base"]
    assert len(data) < len(wire.encode_request(call)) / 4
    assert np.abs(got.astype(int) - call.observation.images["base"]).max() <= 3


def test_a_batch_cannot_be_sent_as_jpeg():
    with pytest.raises(InvalidRequestError, match=r"'base' of shape \(2, 4, 6, 3\) cannot be sent"):
        wire.encode_request(batch(), jpeg_quality=90)


def test_an_image_of_channels_first_is_turned():
    message = request_message()
    message.images[0].shape[:] = (3, 4, 6)
    message.images[0].layout = 2
    message.images[0].data = np.moveaxis(image(), -1, 0).tobytes()
    got = wire.decode_request(message.SerializeToString()).observation
    np.testing.assert_array_equal(got.images["base"], image())


def test_bfloat16_inputs_become_float32():
    message = request_message()
    tensor = message.inputs["x"]
    values = np.array([1.5, -2.0], np.float32)
    tensor.data = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    tensor.shape.extend([2])
    tensor.dtype = 5
    got = wire.decode_request(message.SerializeToString()).observation.inputs["x"]
    assert got.dtype == np.float32
    assert got.tolist() == [1.5, -2.0]


@pytest.mark.parametrize("dtype", ["u1", "i4", "i8", "f2", "f4", "f8", "?", ">f4"])
def test_every_dtype_of_the_protocol_travels(dtype):
    array = np.array([[0, 1, 1]], dtype=dtype)
    call = wire.InferenceCall("r", "m", Observation(inputs={"x": array, "none": array[:0]}))
    got = wire.decode_request(wire.encode_request(call)).observation.inputs
    assert got["x"].dtype == array.dtype.newbyteorder("<")
    np.testing.assert_array_equal(got["x"], array)
    assert got["none"].shape == (0, 3)


def test_a_dtype_outside_the_protocol_is_refused_before_it_is_sent():
    call = wire.InferenceCall("r", "m", Observation(inputs={"x": np.zeros(2, np.complex64)}))
    with pytest.raises(InvalidRequestError, match="input 'x' is complex64; send one of uint8"):
        wire.encode_request(call)


def test_a_state_of_doubles_is_taken_as_floats():
    message = request_message()
    message.robot_state.data = np.array([0.5, 2.0]).tobytes()
    message.robot_state.dtype = 7
    state = wire.decode_request(message.SerializeToString()).observation.state
    assert state.dtype == np.float32
    assert state.tolist() == [0.5, 2.0]


def test_an_answer_arrives_as_it_was_sent():
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    outputs = {"values": np.arange(2, dtype=np.float64)}
    data = wire.encode_response(
        wire.InferenceAnswer("r-1", Actions(values, outputs), 1234, {"queue_us": 5})
    )
    got = wire.decode_response(data)
    assert (got.request_id, got.inference_time_us) == ("r-1", 1234)
    assert got.extensions == {"queue_us": 5}
    np.testing.assert_array_equal(got.actions.values, values)
    np.testing.assert_array_equal(got.actions.outputs["values"], outputs["values"])
    assert wire.peek_response(data) == wire.ResponseHead("r-1", 1234)


def test_an_answer_without_actions_is_refused():
    with pytest.raises(InvalidRequestError, match="actions has data type 0"):
        wire.decode_response(b"\x0a\x01r")
    flat = wire.InferenceAnswer("r", Actions(np.zeros(3, np.float32)))
    with pytest.raises(MalformedRequestError, match=r"of shape \(3,\), not float32 of"):
        wire.decode_response(wire.encode_response(flat))


def test_health_and_registration_arrive_as_they_were_sent():
    assert wire.decode_health_request(wire.encode_health_request("pi05")) == "pi05"
    assert wire.decode_health_response(wire.encode_health_response(True)) is True
    registration = wire.Registration("10.0.0.1:50063", "pi05")
    assert wire.decode_registration(wire.encode_registration(registration)) == registration
    accepted = wire.RegistrationAnswer(True, "s-1", 5.0)
    refused = wire.RegistrationAnswer(False, message="no such port")
    for answer in (accepted, refused):
        data = wire.encode_registration_answer(answer)
        assert wire.decode_registration_answer(data) == answer
    assert wire.decode_heartbeat(wire.encode_heartbeat("s-1")) == "s-1"
    beat = wire.HeartbeatAnswer(False, "unknown server")
    assert wire.decode_heartbeat_answer(wire.encode_heartbeat_answer(beat)) == beat


@pytest.mark.parametrize("interval_s", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_heartbeat_interval_is_refused(interval_s):
    answer = wire.RegistrationAnswer(True, "s-1", interval_s)
    with pytest.raises(MalformedRequestError, match="must be a positive number of seconds"):
        wire.decode_registration_answer(wire.encode_registration_answer(answer))


def test_the_stream_of_a_robot_carries_observations_and_commands():
    sent = Observation({"image": image()}, np.zeros(6, np.float32), ("go",))
    got = wire.decode_sensor_data(wire.encode_sensor_data(wire.SensorData(9, sent)))
    assert got.timestamp_ns == 9
    assert_same(got.observation, sent)
    actions = np.arange(6, dtype=np.float32).reshape(2, 3)
    command = wire.decode_action_command(wire.encode_action_command(wire.ActionCommand(9, actions)))
    assert command.timestamp_ns == 9
    np.testing.assert_array_equal(command.actions, actions)
