"""Fits an image into a policy's square without distortion, as openpi and LeRobot do it."""

from __future__ import annotations

import torch.nn.functional as functional
from torch import Tensor


def resize_with_pad(images: Tensor, height: int, width: int) -> Tensor:
    """Images (B, C, H, W) of [0, 1] as (B, C, height, width), centred, black around them.

    Bilinear without antialiasing. Sizes are cut to whole pixels; a pixel of padding that cannot be
    halved is at the right or the bottom. Images of that size already are returned as they are.
    """
    rows, columns = images.shape[-2:]
    if (rows, columns) == (height, width):
        return images
    ratio = max(columns / width, rows / height)
    # At least a line is left of what is very long.
    inner = max(1, int(rows / ratio)), max(1, int(columns / ratio))
    resized = functional.interpolate(images, inner, mode="bilinear", align_corners=False)
    top, below = divmod(height - inner[0], 2)
    left, right = divmod(width - inner[1], 2)
    padding = (left, left + right, top, top + below)
    return functional.pad(resized.clamp(0.0, 1.0), padding)


def to_policy_range(images: Tensor) -> Tensor:
    """From [0, 1] to [-1, 1], as SigLIP takes them."""
    return images * 2.0 - 1.0
