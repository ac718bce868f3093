"""Latents as tokens and back: patches by row and column, of a patch its rows, columns, channels."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def patchify(latents: Tensor, size: int) -> Tensor:
    """Latents [C, T, H, W], padded by zeros to whole patches, as [T * rows * columns, size^2 * C]."""
    height, width = latents.shape[2:]
    padded = functional.pad(latents, (0, -width % size, 0, -height % size))
    channels, frames, height, width = padded.shape
    cut = padded.view(channels, frames, height // size, size, width // size, size)
    return cut.permute(1, 2, 4, 3, 5, 0).reshape(-1, size * size * channels)


def unpatchify(patches: Tensor, grid: tuple[int, int], shape: tuple[int, int], size: int) -> Tensor:
    """Patches of frames of `grid` rows and columns as latents [C, frames, *shape]; cuts padding off."""
    rows, columns = grid
    cut = patches.view(-1, rows, columns, size, size, patches.shape[-1] // size**2)
    whole = cut.permute(5, 0, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
    return whole[:, :, : shape[0], : shape[1]]
