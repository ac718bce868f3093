"""What ACT is given: what to load, and prepared observations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from phalanx.engine_config import EntryArgs


@dataclass(frozen=True)
class ACTArgs(EntryArgs):
    """`checkpoint_dir`: a directory of LeRobot. `max_batch_size`: rows that a request may have."""

    checkpoint_dir: str | Path
    max_batch_size: int = 8


@dataclass(frozen=True, eq=False)
class ACTRequest:
    """Normalized observations, one a row: `images` float (B, 3, H, W) by the checkpoint's name of the
    camera, `state` float (B, S). The output is the normalized actions, float32 (B, chunk, actions).
    """

    images: Mapping[str, Tensor]
    state: Tensor
