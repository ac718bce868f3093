"""Turns what a robot sends into what a policy's steps begin with, or says what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.errors import InvalidRequestError
from phalanx.processing.policy.camera_names import CameraNames, short_name
from phalanx.processing.policy.stock_resize import stock_resize
from phalanx.processing.policy.transition import STATE, Transition
from phalanx.schema.observation import Observation

LEROBOT = "lerobot"
"""The parameter whose presence asks for LeRobot's own way with images."""


@dataclass(frozen=True)
class ObservationReader:
    """`cameras`: (channels, height, width) by the checkpoint's name. `sizes`: (height, width) that
    images must have, by the same names; a camera that is not in it may send any. `state_names`:
    inputs that make up the state. `inputs`: further inputs that the policy reads itself.
    `all_cameras`: refuse an observation that lacks one.
    """

    names: CameraNames
    cameras: Mapping[str, tuple[int, int, int]]
    sizes: Mapping[str, tuple[int, int]]
    state_dim: int | None
    state_names: Sequence[str] = ()
    inputs: Sequence[str] = ()
    all_cameras: bool = False

    def read(self, observation: Observation) -> Transition:
        """Images as float in [0, 1], and the state, each with a row for each of the observation's.

        Raises `InvalidRequestError` naming what is missing, unknown or of a wrong size.
        """
        for name in observation.inputs:
            if name not in self.state_names and name not in self.inputs:
                raise InvalidRequestError(
                    f"there is no input {name!r}; this policy takes images, a state and "
                    "instructions",
                    field=name,
                )
        tensors = self._images(observation)
        if self.state_dim is not None:
            tensors[STATE] = self.state(observation)
        return Transition(tensors, observation.instructions)

    def _images(self, observation: Observation) -> dict[str, Tensor]:
        found = self.names.by_key(observation.images)
        missing = [key for key in self.cameras if key not in found]
        if missing and (self.all_cameras or not found):
            raise InvalidRequestError(
                f"there is no image of {', '.join(map(short_name, missing))}; this policy takes "
                f"{', '.join(self.names.shown)}, and needs "
                f"{'all' if self.all_cameras else 'at least one'} of them",
                field="images",
            )
        stock = observation.parameters.get(LEROBOT) is not None
        return {
            key: self._image(key, name, observation, stock=stock) for key, name in found.items()
        }

    def _image(self, key: str, name: str, observation: Observation, *, stock: bool) -> Tensor:
        array = observation.images[name]
        if not observation.batched:
            array = array[None]
        channels, height, width = self.cameras[key]
        if array.shape[-1] != channels:
            raise InvalidRequestError(
                f"image {name!r} has {array.shape[-1]} channels; this policy takes {channels}",
                field=name,
            )
        pixels = torch.from_numpy(readable(array))
        if stock:
            return stock_resize(pixels, height, width).float() / 255
        wanted = self.sizes.get(key, array.shape[1:3])
        if array.shape[1:3] != wanted:
            raise InvalidRequestError(
                f"image {name!r} is {array.shape[1]} x {array.shape[2]} (height x width); this "
                f"policy takes {wanted[0]} x {wanted[1]}",
                field=name,
            )
        return pixels.permute(0, 3, 1, 2).float() / 255

    def state(self, observation: Observation) -> Tensor:
        """The state with a row for each of the observation's; asked of policies that take one."""
        width = self.state_dim
        state = observation.state
        if state is None and self.state_names:
            state = self._joined_state(observation)
        if state is None:
            raise InvalidRequestError(
                f"there is no state; this policy takes {width} numbers", field="state"
            )
        if state.shape[-1] != width:
            raise InvalidRequestError(
                f"the state has {state.shape[-1]} numbers; this policy takes {width}",
                field="state",
            )
        values = state if observation.batched else state[None]
        return torch.from_numpy(readable(values))

    def _joined_state(self, observation: Observation) -> NDArray[np.float32]:
        parts = []
        for name in self.state_names:
            if name not in observation.inputs:
                raise InvalidRequestError(
                    f"there is neither a state nor an input {name!r}; the state of this policy is "
                    f"{' and '.join(self.state_names)}, one after another",
                    field=name,
                )
            # What does not fit becomes infinite, which is refused below.
            with np.errstate(over="ignore"):
                part = np.asarray(observation.inputs[name], np.float32)
            parts.append(_with_rows(part, name, observation.num_rows))
        joined = np.concatenate(parts, axis=-1)
        joined = joined if observation.batched else joined[0]
        if not np.isfinite(joined).all():
            raise InvalidRequestError(
                f"the state ({', '.join(self.state_names)}) is not finite; send finite numbers",
                field="state",
            )
        return joined


def _with_rows(part: NDArray[np.float32], name: str, rows: int) -> NDArray[np.float32]:
    """A part of the state as (rows, numbers)."""
    if rows > 1 and (part.ndim == 0 or len(part) != rows):
        raise InvalidRequestError(
            f"input {name!r} has shape {part.shape} beside {rows} instructions; send a row for each",
            field=name,
        )
    return part.reshape(rows, part.size // rows)


def readable(array: NDArray[np.generic]) -> NDArray[np.generic]:
    """As torch can share it: with strides that it knows, and writable, though nobody writes."""
    if array.flags.writeable and all(stride >= 0 for stride in array.strides):
        return array
    return array.copy()
