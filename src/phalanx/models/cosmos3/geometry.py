"""Which tokens a request has besides its text, in which order, and at which positions.

Tokens are those of the video (by frame, row, column of patches), of the sound, of the actions. All
begin at the same time, behind the text. Positions are float32 numbers that are part of the model: a
wider or narrower type, or another order of the same operations, gives other numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from phalanx.models.cosmos3.config import Cosmos3Config

SPATIAL_STRIDE = 16
TEMPORAL_STRIDE = 4
SOUND_RATE = 48000
SOUND_HOP = 1920

Run = tuple[int, int]
"""From (inclusive) and to (exclusive) which item."""


@dataclass(frozen=True)
class MediaShape:
    """The layout of one request's media.

    `video` are latent frames, rows and columns; odd rows and columns are padded to whole patches.
    `action_rows` include a leading row that is the state, where `has_state`. Clean frames and rows
    are given, not drawn: they have no time, and nothing is read out of them.
    """

    video: tuple[int, int, int]
    fps: float
    sound_frames: int = 0
    action_rows: int = 0
    has_state: bool = False
    clean_frames: frozenset[int] = frozenset()
    clean_rows: frozenset[int] = frozenset()
    patch_size: int = 2

    @property
    def patch_grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        _, height, width = self.video
        return -(-height // self.patch_size), -(-width // self.patch_size)

    @property
    def patches_per_frame(self) -> int:
        rows, columns = self.patch_grid
        return rows * columns

    @property
    def num_vision_tokens(self) -> int:
        return self.video[0] * self.patches_per_frame

    @property
    def num_tokens(self) -> int:
        return self.num_vision_tokens + self.sound_frames + self.action_rows

    @property
    def noisy_frames(self) -> tuple[Run, ...]:
        """The latent frames that are drawn."""
        return _runs(self.video[0], self.clean_frames)

    @property
    def noisy_rows(self) -> tuple[Run, ...]:
        """The action rows that are drawn."""
        return _runs(self.action_rows, self.clean_rows)


@lru_cache(maxsize=256)
def _runs(count: int, clean: frozenset[int]) -> tuple[Run, ...]:
    return tuple(_noisy_runs(count, clean))


def _noisy_runs(count: int, clean: frozenset[int]) -> Iterator[Run]:
    start = 0
    for item in (*sorted(clean), count):
        if start < item:
            yield start, min(item, count)
        start = item + 1


def latent_grid(frames: int, height: int, width: int) -> tuple[int, int, int]:
    """Latent frames, rows and columns of a clip of so many frames and pixels."""
    return (
        (frames - 1) // TEMPORAL_STRIDE + 1,
        height // SPATIAL_STRIDE,
        width // SPATIAL_STRIDE,
    )


def sound_length(frames: int, fps: float) -> int:
    """Latents of the sound that goes with a clip."""
    return math.ceil(int(frames / fps * SOUND_RATE) / SOUND_HOP)


def media_positions(config: Cosmos3Config, shape: MediaShape, und_len: int) -> Tensor:
    """Time, height and width of every media token behind `und_len` text tokens: float32 [3, N]."""
    start = und_len + config.unified_3d_mrope_temporal_modality_margin
    rows, columns = shape.patch_grid
    frames = _Stream(shape.video[0], shape.fps, TEMPORAL_STRIDE, TEMPORAL_STRIDE, 0)
    sound = _Stream(shape.sound_frames, config.sound_latent_fps, 1, 1, 0)
    actions = _Stream(shape.action_rows, shape.fps, 1, TEMPORAL_STRIDE, 0 if shape.has_state else 1)
    corner = 0 if config.unified_3d_mrope_reset_spatial_ids else start
    parts = [
        _grid(
            frames.times(config, start),
            torch.arange(rows, dtype=torch.float32) + corner,
            torch.arange(columns, dtype=torch.float32) + corner,
        )
    ]
    here = torch.full((1,), float(corner))
    parts += [_grid(one.times(config, start), here, here) for one in (sound, actions)]
    return torch.cat(parts, dim=1)


@dataclass(frozen=True)
class _Stream:
    """Items at so many a second, every `stride` of them one token; `base_stride` where the model's
    own rate is meant.
    """

    count: int
    fps: float
    stride: int
    base_stride: int
    shift: int

    def times(self, config: Cosmos3Config, start: int) -> Tensor:
        items = torch.arange(self.count, dtype=torch.float32) + self.shift
        if self.count > 1 and config.enable_fps_modulation:
            items = items / (self.fps / self.stride) * (config.base_fps / self.base_stride)
        return items + start


def _grid(times: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """All combinations, the last fastest."""
    return torch.stack(torch.meshgrid(times, rows, columns, indexing="ij")).flatten(1)
