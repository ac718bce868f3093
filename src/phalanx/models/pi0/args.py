"""Arguments of the `pi0` plugin."""

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
from phalanx.models.pi0.config import PI0Config


@dataclass(frozen=True)
class PI0Args(EntryArgs):
    """What to load; see `PI05Args`."""

    checkpoint_dir: str | Path | None = None
    config: PI0Config | None = None
    max_batch_size: int = 1
    weight_remap: Callable[[str], str | None] | Mapping[str, str] | None = None
    weight_strict: bool = True
    vision_params_dtype: Any = None
    inputs_image_shape: ImageShapes | None = None
    native_operators: str = "auto"

    def __post_init__(self) -> None:
        check_batch_size(self.max_batch_size)
        check_remap(self.weight_remap)
        check_operators(self.native_operators)
        check_image_shapes(self.inputs_image_shape)
        vision_dtype(self.vision_params_dtype)
