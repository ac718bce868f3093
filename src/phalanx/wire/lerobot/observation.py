"""A robot's timed observation as an `Observation`, by what its client declared at the beginning."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import BodyTooLargeError, InvalidRequestError
from phalanx.schema.observation import Observation
from phalanx.wire.lerobot.features import IMAGES, Camera
from phalanx.wire.lerobot.records import PolicyInstructions, Sensor, TimedObservation

TASK: Final = "task"
LEROBOT: Final = "lerobot"
MAX_IMAGE_BYTES: Final = 100 * 1024 * 1024
_LARGEST: Final = float(np.finfo(np.float32).max)


def to_observation(instructions: PolicyInstructions, timed: TimedObservation) -> Observation:
    """Raises `InvalidRequestError` in words for the robot's operator."""
    _check_size(instructions)
    task = timed.sensors.get(TASK, "")
    if not isinstance(task, str):
        raise InvalidRequestError("the observation's task is no text", field=TASK)
    images = {
        policy_name(instructions, camera): _image(camera, timed.sensors)
        for camera in instructions.features.cameras
    }
    return _observation(instructions, images, _state(instructions, timed.sensors), task)


def blank_observation(instructions: PolicyInstructions) -> Observation:
    """One of the declared shapes, all zero: what tells whether a policy takes such a robot.

    Raises `BodyTooLargeError` before it makes what is too large.
    """
    _check_size(instructions)
    names = instructions.features.state_names
    images = {
        policy_name(instructions, camera): np.zeros(camera.shape, np.uint8)
        for camera in instructions.features.cameras
    }
    state = np.zeros(len(names), np.float32) if names else None
    return _observation(instructions, images, state, "")


def policy_name(instructions: PolicyInstructions, camera: Camera) -> str:
    """What the policy calls this camera: its key after the client's renaming, without the prefix."""
    return instructions.rename_map.get(camera.key, camera.key).removeprefix(IMAGES)


def _observation(
    instructions: PolicyInstructions,
    images: dict[str, NDArray[np.uint8]],
    state: NDArray[np.float32] | None,
    task: str,
) -> Observation:
    settings = {
        "policy_type": instructions.policy_type,
        "pretrained_name_or_path": instructions.model,
        "actions_per_chunk": instructions.actions_per_chunk,
        "device": instructions.device,
        "rename_map": dict(instructions.rename_map),
        "lerobot_features": dict(instructions.features.declared),
    }
    return Observation(
        images=images,
        state=state,
        instructions=(task,),
        horizon=instructions.actions_per_chunk,
        parameters={LEROBOT: settings},
    )


def _check_size(instructions: PolicyInstructions) -> None:
    """By what the robot declared, which each of its images must be."""
    num_bytes = sum(math.prod(camera.shape) for camera in instructions.features.cameras)
    if num_bytes > MAX_IMAGE_BYTES:
        raise BodyTooLargeError(
            f"the robot's images have {num_bytes} bytes; at most {MAX_IMAGE_BYTES} are taken"
        )


def _image(camera: Camera, sensors: Mapping[str, Sensor]) -> NDArray[np.uint8]:
    image = sensors.get(camera.name)
    if image is None:
        raise InvalidRequestError(
            f"the observation has no camera {camera.name!r}, which the robot declared; it has "
            f"{_listed(sensors)}",
            field=camera.name,
        )
    wanted = f"uint8 of shape {camera.shape}, as the robot declared"
    if not isinstance(image, np.ndarray):
        raise InvalidRequestError(
            f"camera {camera.name!r} sent {type(image).__name__}, not {wanted}", field=camera.name
        )
    if image.dtype != np.uint8 or image.shape != camera.shape:
        raise InvalidRequestError(
            f"camera {camera.name!r} sent {image.dtype} of shape {image.shape}, not {wanted}",
            field=camera.name,
        )
    return image.astype(np.uint8, copy=False)


def _state(
    instructions: PolicyInstructions, sensors: Mapping[str, Sensor]
) -> NDArray[np.float32] | None:
    names = instructions.features.state_names
    if not names:
        return None
    return np.array([_joint(name, sensors) for name in names], np.float32)


def _joint(name: str, sensors: Mapping[str, Sensor]) -> float:
    value = sensors.get(name)
    if value is None:
        raise InvalidRequestError(
            f"the observation has no joint {name!r}, which the robot declared; it has "
            f"{_listed(sensors)}",
            field=name,
        )
    if isinstance(value, np.ndarray) and value.size == 1:
        value = float(value.reshape(-1)[0])
    if not isinstance(value, float):
        raise InvalidRequestError(f"joint {name!r} is no number", field=name)
    # What float32 cannot hold would become infinite.
    if not math.isfinite(value) or abs(value) > _LARGEST:
        raise InvalidRequestError(f"joint {name!r} is {value}; send a finite number", field=name)
    return value


def _listed(sensors: Mapping[str, Sensor]) -> str:
    names = [repr(name[:80]) for name in sensors]
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
