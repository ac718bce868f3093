"""Pixels of a small square as channels of one: (color, column, row), row fastest."""

from __future__ import annotations

import torch
from torch import Tensor


def to_patches(pixels: Tensor, size: int) -> Tensor:
    """[frames, C, H, W] to [frames, C * size^2, H / size, W / size]."""
    frames, channels, height, width = pixels.shape
    small = pixels.reshape(frames, channels, height // size, size, width // size, size)
    patches = small.permute(0, 1, 5, 3, 2, 4).reshape(
        frames, channels * size**2, height // size, width // size
    )
    return patches.contiguous(memory_format=torch.channels_last)


def from_patches(patches: Tensor, size: int) -> Tensor:
    """The inverse of `to_patches`."""
    frames, channels, height, width = patches.shape
    colors = channels // size**2
    small = patches.reshape(frames, colors, size, size, height, width)
    return small.permute(0, 1, 4, 3, 5, 2).reshape(frames, colors, height * size, width * size)
