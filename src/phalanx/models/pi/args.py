"""What the arguments of pi policies have in common: their checks, and the dtype of the vision tower."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from phalanx.engine_config import resolve_params_dtype, resolve_params_dtype_name
from phalanx.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

NATIVE_OPERATORS = ("auto", "off", "required")

ImageShapes = tuple[tuple[int, int, int], ...]


def check_batch_size(max_batch_size: object) -> None:
    boolean = isinstance(max_batch_size, bool)
    if boolean or not isinstance(max_batch_size, int) or max_batch_size < 1:
        raise ConfigurationError(f"max_batch_size={max_batch_size!r} must be a positive integer")


def check_operators(choice: object) -> None:
    if choice not in NATIVE_OPERATORS:
        raise ConfigurationError(f"native_operators={choice!r}; allowed: {NATIVE_OPERATORS}")


def check_remap(remap: object) -> None:
    if remap is not None and not isinstance(remap, Mapping | Callable):
        raise ConfigurationError(
            f"weight_remap is {type(remap).__name__}; give a function from a name to a name or "
            "None, or a mapping of substrings"
        )


def check_image_shapes(shapes: ImageShapes | None) -> None:
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


def vision_dtype(given: object) -> torch.dtype:
    """The vision tower's dtype: float32 unless it is given, whatever the rest has."""
    return resolve_params_dtype("float32" if given is None else resolve_params_dtype_name(given))
