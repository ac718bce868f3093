"""What the arguments of pi policies have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.engine_config import EntryArgs, resolve_params_dtype, resolve_params_dtype_name
from phalanx.errors import ConfigurationError
from phalanx.models.pi.config import PiConfig

if TYPE_CHECKING:
    import torch

NATIVE_OPERATORS = ("auto", "off", "required")

ImageShapes = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class PiArgs(EntryArgs):
    """What to load.

    `checkpoint_dir`: a directory of LeRobot or openpi; None for random weights of the published
    sizes. `config`: sizes that the checkpoint does not tell. `max_batch_size`: rows that are
    computed together, and that one request may have. `weight_remap` renames tensors: a function,
    which drops one by None, or a mapping of substrings. `weight_strict`: refuse a checkpoint with
    tensors that are missing, unknown or of another shape; else they are logged.
    `vision_params_dtype`: float32 unless given. `inputs_image_shape`: [height, width, 3] of each
    camera's images before they are resized; their number is that of the cameras.
    `native_operators` as in `causal_lm`.
    """

    checkpoint_dir: str | Path | None = None
    config: PiConfig | None = None
    max_batch_size: int = 1
    weight_remap: Callable[[str], str | None] | Mapping[str, str] | None = None
    weight_strict: bool = True
    vision_params_dtype: Any = None
    inputs_image_shape: ImageShapes | None = None
    native_operators: str = "auto"

    def __post_init__(self) -> None:
        _check_batch_size(self.max_batch_size)
        _check_remap(self.weight_remap)
        _check_operators(self.native_operators)
        _check_image_shapes(self.inputs_image_shape)
        resolve_params_dtype_name(self._vision_dtype)

    @property
    def num_cameras(self) -> int | None:
        """How many are told; None where the configuration or the checkpoint says."""
        return None if self.inputs_image_shape is None else len(self.inputs_image_shape)

    @property
    def vision_dtype(self) -> torch.dtype:
        """The vision tower's dtype: float32 unless it is given, whatever the rest has."""
        return resolve_params_dtype(resolve_params_dtype_name(self._vision_dtype))

    @property
    def _vision_dtype(self) -> object:
        return "float32" if self.vision_params_dtype is None else self.vision_params_dtype


def _check_batch_size(max_batch_size: object) -> None:
    boolean = isinstance(max_batch_size, bool)
    if boolean or not isinstance(max_batch_size, int) or max_batch_size < 1:
        raise ConfigurationError(f"max_batch_size={max_batch_size!r} must be a positive integer")


def _check_operators(choice: object) -> None:
    if choice not in NATIVE_OPERATORS:
        raise ConfigurationError(f"native_operators={choice!r}; allowed: {NATIVE_OPERATORS}")


def _check_remap(remap: object) -> None:
    if remap is not None and not isinstance(remap, Mapping | Callable):
        raise ConfigurationError(
            f"weight_remap is {type(remap).__name__}; give a function from a name to a name or "
            "None, or a mapping of substrings"
        )


def _check_image_shapes(shapes: ImageShapes | None) -> None:
    """Refuse shapes that are not those of colour images, one for each camera."""
    if shapes is None:
        return
    for shape in shapes:
        if len(shape) != 3 or shape[2] != 3 or min(shape) < 1:
            raise ConfigurationError(
                f"inputs_image_shape has {list(shape)}; give [height, width, 3] for each camera"
            )
    if not shapes:
        raise ConfigurationError("inputs_image_shape is empty; give one shape for each camera")
