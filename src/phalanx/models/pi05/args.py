"""Arguments of the `pi05` plugin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.engine_config import EntryArgs
from phalanx.models.pi.args import (
    ImageShapes,
    check_batch_size,
    check_image_shapes,
    check_operators,
    check_remap,
    vision_dtype,
)
from phalanx.models.pi05.config import PI05Config


@dataclass(frozen=True)
class PI05Args(EntryArgs):
    """What to load.

    `checkpoint_dir`: a directory of LeRobot or openpi; None for random weights of the published
    sizes. `config`: sizes that the checkpoint does not tell. `max_batch_size`: rows that are
    computed together, and that one request may have. `weight_remap` renames tensors: a function,
    which drops one by None, or a mapping of substrings. `weight_strict`: refuse a checkpoint with
    tensors that are missing, unknown or of another shape; else they are logged.
    `vision_params_dtype`: float32 unless given. `inputs_image_shape`: [height, width, 3] of each
    camera's images before they are resized; their number is that of the cameras.
    `native_operators` as in `causal_lm`. `capture_rollout`: capture rollouts too, on CUDA.
    """

    checkpoint_dir: str | Path | None = None
    config: PI05Config | None = None
    max_batch_size: int = 1
    weight_remap: Callable[[str], str | None] | Mapping[str, str] | None = None
    weight_strict: bool = True
    vision_params_dtype: Any = None
    inputs_image_shape: ImageShapes | None = None
    capture_rollout: bool = False
    native_operators: str = "auto"

    def __post_init__(self) -> None:
        check_batch_size(self.max_batch_size)
        check_remap(self.weight_remap)
        check_operators(self.native_operators)
        check_image_shapes(self.inputs_image_shape)
        vision_dtype(self.vision_params_dtype)
