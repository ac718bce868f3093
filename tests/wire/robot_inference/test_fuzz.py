"""Whatever arrives is decoded or refused: `make test-long` tries for longer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from phalanx.schema.observation import Actions
from phalanx.wire import robot_inference as wire
from tests.wire.fuzzing import LONG_S, fuzz_for, mutations, outcome
from tests.wire.robot_inference.observations import batch, image, single

ANSWER = wire.InferenceAnswer("r", Actions(image()[..., 0].astype("f4")), 7, {"a": [1]})
REQUESTS = (
    wire.encode_request(single()),
    wire.encode_request(batch()),
    wire.encode_request(single(), jpeg_quality=90),
)
RESPONSES = (wire.encode_response(ANSWER),)
SENSORS = (wire.encode_sensor_data(wire.SensorData(1, single().observation)),)
SMALL = (
    wire.encode_health_request("pi05"),
    wire.encode_registration(wire.Registration("h:1", "pi05")),
    wire.encode_registration_answer(wire.RegistrationAnswer(True, "s", 5.0, "m")),
)


def decode_small(data: bytes) -> None:
    for decode in (
        wire.decode_health_request,
        wire.decode_health_response,
        wire.decode_registration,
        wire.decode_registration_answer,
        wire.decode_heartbeat,
        wire.decode_heartbeat_answer,
        wire.decode_action_command,
    ):
        outcome(decode, data)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(mutations(REQUESTS))
def test_requests(data):
    ending = outcome(wire.decode_request, data)
    assert ending != "decoded" or outcome(wire.peek, data) == "decoded"


@settings(max_examples=40, derandomize=True, deadline=None)
@given(mutations(RESPONSES))
def test_answers(data):
    ending = outcome(wire.decode_response, data)
    assert ending != "decoded" or outcome(wire.peek_response, data) == "decoded"


@settings(max_examples=40, derandomize=True, deadline=None)
@given(mutations(SENSORS))
def test_sensor_data(data):
    outcome(wire.decode_sensor_data, data)


@settings(max_examples=30, derandomize=True, deadline=None)
@given(mutations(SMALL))
def test_small_messages(data):
    decode_small(data)


@pytest.mark.long
def test_all_of_it_for_long():
    fuzz_for(LONG_S * 0.6, wire.decode_request, REQUESTS)
    fuzz_for(LONG_S * 0.2, wire.decode_response, RESPONSES)
    fuzz_for(LONG_S * 0.2, wire.decode_sensor_data, SENSORS)
