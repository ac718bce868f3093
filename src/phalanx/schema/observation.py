"""What a robot sees and is told, and the actions that a policy answers: the values that every robot
protocol is decoded to and encoded from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import InvalidRequestError


@dataclass(frozen=True, eq=False)
class Observation:
    """One moment of a robot, or of `num_rows` robots where it is `batched`.

    `images`: by camera name, uint8 of shape (H, W, C), or (B, H, W, C) where batched; in the order
    in which they were sent. `state`: float32 of shape (S,) or (B, S), in the units of the robot.
    `instructions`: one text a row. `horizon`: how many actions are wanted, None for all that
    the policy gives. `inputs`: further arrays by name, for plugins that take tensors as they are.
    `parameters`: further settings, as JSON values (`num_steps`, `rtc`, `lerobot`, ...).
    """

    images: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)
    state: NDArray[np.float32] | None = None
    instructions: tuple[str, ...] = ("",)
    batched: bool = False
    horizon: int | None = None
    inputs: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)
    parameters: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = len(self.instructions)
        if rows < 1 or (rows > 1 and not self.batched):
            raise InvalidRequestError(
                f"{rows} instructions for {'a batch' if self.batched else 'a single observation'};"
                " give one for each row",
                field="instructions",
            )
        if self.horizon is not None and self.horizon < 1:
            raise InvalidRequestError(
                f"requested_action_horizon={self.horizon} must be at least 1; leave it out for all",
                field="requested_action_horizon",
            )
        for name, image in self.images.items():
            _check_image(name, image, rows, batched=self.batched)
        if self.state is not None:
            _check_state(self.state, rows, batched=self.batched)

    @property
    def num_rows(self) -> int:
        return len(self.instructions)


@dataclass(frozen=True, eq=False)
class Actions:
    """`values`: float32 of shape (horizon, action_dim), or (B, horizon, action_dim) where the
    observation was batched. `outputs`: further arrays by name.
    """

    values: NDArray[np.float32]
    outputs: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)


@dataclass(frozen=True)
class PolicyInfo:
    """What a served policy takes and gives, for clients and operators.

    `cameras`: the names that observations may use, in the policy's order. `state_dim` is None for a
    policy without a state; `horizon` actions of `action_dim` numbers come from one observation.
    """

    policy: str
    cameras: tuple[str, ...]
    state_dim: int | None
    action_dim: int
    horizon: int


def _check_image(name: str, image: NDArray[np.uint8], rows: int, *, batched: bool) -> None:
    wanted = "(B, H, W, C)" if batched else "(H, W, C)"
    if image.dtype != np.uint8:
        raise InvalidRequestError(
            f"image {name!r} is {image.dtype}; send uint8 of shape {wanted}", field=name
        )
    if image.ndim != (4 if batched else 3) or 0 in image.shape:
        raise InvalidRequestError(
            f"image {name!r} has shape {image.shape}; send {wanted}", field=name
        )
    if batched and len(image) != rows:
        raise InvalidRequestError(
            f"image {name!r} has {len(image)} rows beside {rows} instructions", field=name
        )


def _check_state(state: NDArray[np.float32], rows: int, *, batched: bool) -> None:
    wanted = "(B, S)" if batched else "(S,)"
    if state.dtype != np.float32:
        raise InvalidRequestError(f"the state is {state.dtype}; send float32", field="state")
    if state.ndim != (2 if batched else 1):
        raise InvalidRequestError(
            f"the state has shape {state.shape}; send {wanted}", field="state"
        )
    if batched and len(state) != rows:
        raise InvalidRequestError(
            f"the state has {len(state)} rows beside {rows} instructions", field="state"
        )
    if not np.isfinite(state).all():
        bad = np.flatnonzero(~np.isfinite(state).reshape(-1))
        raise InvalidRequestError(
            f"the state is not finite at index {bad[0]} ({state.reshape(-1)[bad[0]]}); send "
            "finite numbers",
            field="state",
        )
