"""The autoencoder's sizes, as `vae/config.json` has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from phalanx.errors import CheckpointError


@dataclass(frozen=True)
class VaeConfig:
    """Fields by their names in the file; keys that are not among them are ignored.

    A latent stands for `spatial_factor` x `spatial_factor` pixels, and each but the first in time
    for `temporal_factor` frames.
    """

    z_dim: int
    base_dim: int
    dim_mult: tuple[int, ...]
    num_res_blocks: int
    temperal_downsample: tuple[bool, ...]
    latents_mean: tuple[float, ...]
    latents_std: tuple[float, ...]
    decoder_base_dim: int | None = None
    patch_size: int | None = None
    in_channels: int = 3
    out_channels: int = 3
    is_residual: bool = True
    attn_scales: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        levels = len(self.dim_mult)
        self._check("is_residual", self.is_residual, "true, as Wan 2.2 has it")
        self._check("attn_scales", not self.attn_scales, "empty: attention is in the middle alone")
        self._check("dim_mult", levels >= 2, "at least two levels")
        enough = len(self.temperal_downsample) == levels - 1
        self._check("temperal_downsample", enough, f"one value a level but the last, {levels - 1}")
        for name in ("latents_mean", "latents_std"):
            numbers = getattr(self, name)
            self._check(name, len(numbers) == self.z_dim, f"z_dim={self.z_dim} numbers")
        self._check("latents_std", all(std > 0 for std in self.latents_std), "above 0")
        channels = 3 * self.patch**2
        for name in ("in_channels", "out_channels"):
            right = getattr(self, name) == channels
            self._check(name, right, f"3 * patch_size^2 = {channels}")

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> VaeConfig:
        """Raises `CheckpointError` for a field that is missing or impossible."""
        try:
            return msgspec.convert(document, cls)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"vae/config.json is not one that works here: {error}") from error

    @property
    def patch(self) -> int:
        return self.patch_size or 1

    @property
    def spatial_factor(self) -> int:
        return int(self.patch * 2 ** (len(self.dim_mult) - 1))

    @property
    def temporal_factor(self) -> int:
        return int(2 ** sum(self.temperal_downsample))

    @property
    def encoder_dims(self) -> tuple[int, ...]:
        """Channels before the first level and behind each."""
        return tuple(self.base_dim * factor for factor in (1, *self.dim_mult))

    @property
    def decoder_dims(self) -> tuple[int, ...]:
        """Channels before the first level, the smallest, and behind each."""
        base = self.decoder_base_dim or self.base_dim
        return tuple(base * factor for factor in (self.dim_mult[-1], *reversed(self.dim_mult)))

    def _check(self, field: str, right: bool, allowed: str) -> None:
        if not right:
            raise CheckpointError(f"{field}={getattr(self, field)!r} must be {allowed}")
