"""The messages of a robot that keeps one stream open."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import InvalidRequestError, MalformedRequestError
from phalanx.schema.observation import Observation
from phalanx.wire.robot_inference.images import decode_images, encode_image
from phalanx.wire.robot_inference.messages import ACTION_COMMAND, SENSOR_DATA

MAX_JOINTS = 4096


@dataclass(frozen=True, eq=False)
class SensorData:
    """One moment of the robot, at its own time."""

    timestamp_ns: int
    observation: Observation


@dataclass(frozen=True, eq=False)
class ActionCommand:
    """The actions, float32 of shape (horizon, action_dim), for the sensor data of `timestamp_ns`."""

    timestamp_ns: int
    actions: NDArray[np.float32]


def decode_sensor_data(data: bytes) -> SensorData:
    """Raises `MalformedRequestError` or `InvalidRequestError`, as `decode_request` does."""
    message = SENSOR_DATA.parse(data)
    if len(message.joint_state) > MAX_JOINTS:
        raise InvalidRequestError(
            f"joint_state has {len(message.joint_state)} numbers; at most {MAX_JOINTS} are taken",
            field="joint_state",
        )
    observation = Observation(
        images=decode_images(message.images),
        state=np.asarray(message.joint_state, dtype=np.float32) if message.joint_state else None,
        instructions=(message.instruction,),
    )
    return SensorData(message.timestamp_ns, observation)


def encode_sensor_data(data: SensorData, *, jpeg_quality: int | None = None) -> bytes:
    """The message of one observation that is not batched; its images, state and instruction."""
    message = SENSOR_DATA.new()
    message.timestamp_ns = data.timestamp_ns
    message.instruction = data.observation.instructions[0]
    for name, image in data.observation.images.items():
        encode_image(name, image, message.images.add(), jpeg_quality)
    if data.observation.state is not None:
        message.joint_state.extend(data.observation.state.tolist())
    return message.SerializeToString()


def encode_action_command(command: ActionCommand) -> bytes:
    message = ACTION_COMMAND.new()
    message.timestamp_ns = command.timestamp_ns
    message.horizon, message.action_dim = command.actions.shape
    message.actions.extend(command.actions.reshape(-1).tolist())
    return message.SerializeToString()


def decode_action_command(data: bytes) -> ActionCommand:
    message = ACTION_COMMAND.parse(data)
    if message.horizon * message.action_dim != len(message.actions):
        raise MalformedRequestError(
            f"there are {len(message.actions)} numbers for {message.horizon} actions of "
            f"{message.action_dim}",
            field="actions",
        )
    actions = np.asarray(message.actions, dtype=np.float32)
    return ActionCommand(message.timestamp_ns, actions.reshape(message.horizon, message.action_dim))
