"""Decodes a large video in overlapping tiles, which the ranks of a group share, and blends them.

Tiles differ from the whole near their seams only: there a tile lacks what is beyond its edge. How
many ranks there are changes nothing: each tile is computed alike, and blended in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx import parallel as P
from phalanx.errors import ConfigurationError
from phalanx.models.cosmos3.vae.codec import WanVae


@dataclass(frozen=True)
class Tiling:
    """Tiles of `size` pixels each way, one every `stride` pixels."""

    size: int = 256
    stride: int = 192

    def __post_init__(self) -> None:
        if not 0 < self.stride < self.size <= 2 * self.stride:
            raise ConfigurationError(
                f"tiles of size={self.size} every stride={self.stride} pixels; the stride must be "
                "less than the size, so that tiles overlap, and at least half of it, so that no "
                "pixel is in three"
            )

    def spans(self, extent: int, factor: int) -> tuple[tuple[int, int], ...]:
        """From and to which latent the tiles go along a side of `extent` latents of `factor` pixels."""
        if self.size % factor or self.stride % factor:
            raise ConfigurationError(
                f"tiles of size={self.size} every stride={self.stride} pixels; a latent is {factor} "
                "pixels, of which both must be multiples"
            )
        size, stride = self.size // factor, self.stride // factor
        last = max(0, -(-(extent - size) // stride))
        starts = (index * stride for index in range(last + 1))
        return tuple((start, min(start + size, extent)) for start in starts)


@dataclass(frozen=True)
class _Tile:
    rows: tuple[int, int]
    columns: tuple[int, int]


class TiledDecoder:
    """Decodes with the ranks of `group`; None: alone."""

    def __init__(self, vae: WanVae, tiling: Tiling, group: P.Group | None = None) -> None:
        self._vae, self._tiling, self._group = vae, tiling, group
        self._scale = vae.config.spatial_factor // vae.config.patch
        """Patches of a latent, each way."""
        tiling.spans(1, vae.config.spatial_factor)

    def decode(self, latents: Tensor) -> Tensor:
        """As `WanVae.decode`, the same on every rank; all of them call it, with equal latents."""
        height, width = latents.shape[2:]
        factor = self._vae.config.spatial_factor
        rows, columns = (self._tiling.spans(side, factor) for side in (height, width))
        tiles = [_Tile(row, column) for row in rows for column in columns]
        canvas = self._empty(latents, (0, height), (0, width), torch.float32).zero_()
        size, rank = (1, 0) if self._group is None else (self._group.size, self._group.rank)
        for first in range(0, len(tiles), size):
            turn = tiles[first : first + size]
            own = self._patches(latents, turn[rank]) if rank < len(turn) else None
            for owner, tile in enumerate(turn):
                self._blend(canvas, self._shared(latents, tile, owner, own), tile)
        return self._vae.pixels(canvas).transpose(0, 1)

    def _patches(self, latents: Tensor, tile: _Tile) -> Tensor:
        part = latents[:, :, slice(*tile.rows), slice(*tile.columns)]
        return torch.cat(list(self._vae.decoded(part))).contiguous()

    def _shared(self, latents: Tensor, tile: _Tile, owner: int, own: Tensor | None) -> Tensor:
        """The tile that rank `owner` has made; `own` is this rank's of the same turn."""
        if self._group is None or self._group.rank == owner:
            assert own is not None
            made = own
        else:
            made = self._empty(latents, tile.rows, tile.columns, self._vae.dtype)
        return made if self._group is None else P.broadcast(made, self._group, owner)

    def _empty(
        self, latents: Tensor, rows: tuple[int, int], columns: tuple[int, int], dtype: torch.dtype
    ) -> Tensor:
        """Room for the patches of all frames of so many latents."""
        config = self._vae.config
        frames = 1 + (latents.shape[1] - 1) * config.temporal_factor
        sides = ((end - start) * self._scale for start, end in (rows, columns))
        shape = (frames, config.out_channels, *sides)
        return torch.empty(shape, dtype=dtype, device=self._vae.device)

    def _blend(self, canvas: Tensor, part: Tensor, tile: _Tile) -> None:
        """Add a tile with its share of each patch: linear over what it has in common with others."""
        height, width = canvas.shape[2:]
        down = self._shares(tile.rows, height, canvas.device)
        across = self._shares(tile.columns, width, canvas.device)
        rows, columns = (
            slice(start * self._scale, end * self._scale)
            for start, end in (tile.rows, tile.columns)
        )
        canvas[:, :, rows, columns] += part * (down[:, None] * across)

    def _shares(self, span: tuple[int, int], extent: int, device: torch.device) -> Tensor:
        start, end = (latent * self._scale for latent in span)
        overlap = (self._tiling.size - self._tiling.stride) // self._vae.config.patch
        shares = torch.ones(end - start, device=device)
        ramp = torch.arange(overlap, device=device) / overlap
        if start > 0:
            shares[:overlap] = ramp
        if end < extent:
            shares[-overlap:] = 1 - ramp
        return shares
