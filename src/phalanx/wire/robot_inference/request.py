"""`InferenceRequest` to an `Observation` and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import InvalidRequestError
from phalanx.schema.observation import Observation
from phalanx.wire.arrays import listed
from phalanx.wire.pictures import num_rows
from phalanx.wire.robot_inference.extensions import (
    LEROBOT,
    Extensions,
    decode_extensions,
    encode_extensions,
)
from phalanx.wire.robot_inference.images import decode_images, encode_image
from phalanx.wire.robot_inference.messages import REQUEST, RequestMessage
from phalanx.wire.robot_inference.tensors import decode_tensor, encode_tensor

MAX_HORIZON = (1 << 32) - 1


@dataclass(frozen=True, eq=False)
class InferenceCall:
    """One call of a policy. `timestamp_ns` is the robot's own time of the observation."""

    request_id: str
    model_name: str
    observation: Observation
    timestamp_ns: int = 0


def decode_request(data: bytes) -> InferenceCall:
    """The call; its arrays are read-only views of the message.

    Raises `MalformedRequestError` where the bytes are no such message, and `InvalidRequestError`
    naming the field where what they say cannot be an observation.
    """
    message = REQUEST.parse(data)
    if not message.request_id:
        raise InvalidRequestError(
            "request_id is missing; give each request an id of its own", field="request_id"
        )
    return InferenceCall(
        message.request_id, message.model_name, _observation(message), message.timestamp_ns
    )


def _observation(message: RequestMessage) -> Observation:
    extensions = decode_extensions(message.extensions_json)
    images = decode_images(message.images)
    state = _state(message) if message.HasField("robot_state") else None
    rows = num_rows(images, state)
    batched = rows is not None or extensions.instructions is not None
    return Observation(
        images=images,
        state=state,
        instructions=_instructions(message.instruction, extensions.instructions, rows),
        batched=batched,
        horizon=message.requested_action_horizon or None,
        inputs={
            name: decode_tensor(message.inputs[name], f"input {name!r}") for name in message.inputs
        },
        parameters=_parameters(extensions),
    )


def _state(message: RequestMessage) -> NDArray[np.float32]:
    state = decode_tensor(message.robot_state, "robot_state")
    if state.dtype.kind != "f":
        raise InvalidRequestError(
            f"robot_state is {state.dtype}; send floating-point numbers", field="robot_state"
        )
    # What does not fit becomes infinite, which the observation refuses.
    with np.errstate(over="ignore"):
        return cast(NDArray[np.floating], state).astype(np.float32, copy=False)


def _instructions(one: str, several: list[str] | None, rows: int | None) -> tuple[str, ...]:
    if several is None:
        return (one,) * (1 if rows is None else rows)
    if one:
        raise InvalidRequestError(
            "there are instruction and extensions_json.instructions; give one of them",
            field="instruction",
        )
    return tuple(several)


def _parameters(extensions: Extensions) -> Mapping[str, object]:
    if extensions.lerobot is None:
        return extensions.parameters
    return {**extensions.parameters, LEROBOT: extensions.lerobot}


def encode_request(call: InferenceCall, *, jpeg_quality: int | None = None) -> bytes:
    """The message; images as JPEG files of that quality (1 to 95), raw without one.

    Raises `InvalidRequestError` where the message cannot carry what the observation has.
    """
    observation = call.observation
    message = REQUEST.new()
    message.request_id = call.request_id
    message.model_name = call.model_name
    message.timestamp_ns = call.timestamp_ns
    message.requested_action_horizon = _horizon(observation.horizon)
    for name, image in observation.images.items():
        encode_image(name, image, message.images.add(), jpeg_quality)
    if observation.state is not None:
        encode_tensor(observation.state, message.robot_state, "robot_state")
    for name, array in observation.inputs.items():
        encode_tensor(array, message.inputs[name], f"input {name!r}")
    if not observation.batched:
        message.instruction = observation.instructions[0]
    message.extensions_json = encode_extensions(_extensions(observation))
    return message.SerializeToString()


def _horizon(horizon: int | None) -> int:
    if horizon is not None and horizon > MAX_HORIZON:
        raise InvalidRequestError(
            f"requested_action_horizon={horizon} must be at most {MAX_HORIZON}",
            field="requested_action_horizon",
        )
    return horizon or 0


def _extensions(observation: Observation) -> Extensions:
    parameters = dict(observation.parameters)
    lerobot = parameters.pop(LEROBOT, None)
    if lerobot is not None and not isinstance(lerobot, dict):
        raise InvalidRequestError(
            f"parameters.{LEROBOT} is {type(lerobot).__name__}; give a mapping",
            field=f"parameters.{LEROBOT}",
        )
    instructions = list(observation.instructions) if observation.batched else None
    return Extensions(instructions, listed(parameters), lerobot)
