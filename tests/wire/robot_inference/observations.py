"""Observations and hostile variants of their messages, for the tests of the protocol."""

from __future__ import annotations

import numpy as np

from phalanx.schema.observation import Observation
from phalanx.wire.robot_inference import InferenceCall
from phalanx.wire.robot_inference.messages import REQUEST


def image(height: int = 4, width: int = 6) -> np.ndarray:
    """A smooth picture, so that a JPEG of it is close to it."""
    rows = np.linspace(0, 200, height)[:, None, None]
    columns = np.linspace(0, 50, width)[None, :, None]
    return np.broadcast_to(rows + columns, (height, width, 3)).astype(np.uint8)


def single() -> InferenceCall:
    observation = Observation(
        images={"base": image(), "wrist": image(2, 3)},
        state=np.arange(8, dtype=np.float32),
        instructions=("pick the cube",),
        horizon=7,
        inputs={"mask": np.array([[True, False]]), "ids": np.arange(3, dtype=np.int64)},
        parameters={"num_steps": 5, "rtc": {"inference_delay": 2}, "lerobot": {"fps": 30}},
    )
    return InferenceCall("r-1", "pi05", observation, timestamp_ns=-3)


def batch() -> InferenceCall:
    observation = Observation(
        images={"base": np.stack([image(), image()])},
        state=np.zeros((2, 8), np.float32),
        instructions=("a", "b"),
        batched=True,
    )
    return InferenceCall("r-2", "pi05", observation)


def request_message():
    """The smallest request that is accepted, to be made worse by a test."""
    message = REQUEST.new()
    message.request_id = "r"
    picture = message.images.add()
    picture.name = "base"
    picture.data = image().tobytes()
    picture.shape.extend((4, 6, 3))
    message.robot_state.data = np.zeros(2, np.float32).tobytes()
    message.robot_state.shape.extend([2])
    message.robot_state.dtype = 6
    return message


def assert_same(got: Observation, sent: Observation) -> None:
    assert list(got.images) == list(sent.images)
    for name in sent.images:
        np.testing.assert_array_equal(got.images[name], sent.images[name])
    np.testing.assert_array_equal(got.state, sent.state)
    assert set(got.inputs) == set(sent.inputs)
    for name in sent.inputs:
        assert got.inputs[name].dtype == sent.inputs[name].dtype
        np.testing.assert_array_equal(got.inputs[name], sent.inputs[name])
    assert (got.instructions, got.batched, got.horizon, got.parameters) == (
        sent.instructions,
        sent.batched,
        sent.horizon,
        sent.parameters,
    )
