"""The autoencoder as a whole: clips in [-1, 1] to normalised latents and back.

A clip goes through in pieces, so that memory is bounded by a piece and not by the clip's length;
whatever the pieces are, the result is the same up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from phalanx.models.cosmos3.vae.config import VaeConfig
from phalanx.models.cosmos3.vae.convolution import FrameConv
from phalanx.models.cosmos3.vae.decoder import Decoder
from phalanx.models.cosmos3.vae.encoder import Encoder
from phalanx.models.cosmos3.vae.patches import from_patches
from phalanx.models.cosmos3.vae.stream import Stream

PIECE_PIXELS = 2**20
"""Pixels of all frames of a piece, as far as one latent's frames are not more."""


class WanVae(nn.Module):
    """See the module. Parameters are as `load_vae` makes them, with their device and dtype."""

    def __init__(self, config: VaeConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder, self.decoder = Encoder(config), Decoder(config)
        self.quant_conv = FrameConv(2 * config.z_dim, 2 * config.z_dim, axes=5)
        self.post_quant_conv = FrameConv(config.z_dim, config.z_dim, axes=5)

    @property
    def dtype(self) -> torch.dtype:
        return self.quant_conv.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.quant_conv.weight.device

    def encode(self, pixels: Tensor, piece: int | None = None) -> Tensor:
        """A clip [3, 1 + 4k, H, W] in [-1, 1] to normalised latents, float32 [z, 1 + k, H/16, W/16].

        They are the mode of the distribution. `piece` is the number of latents that are computed at
        once; by default as many as PIECE_PIXELS allow. A latent depends on its own frames and those
        before, so the first frames alone give the first latents.
        """
        frames, stream = pixels.transpose(0, 1), Stream()
        at_once = self.config.temporal_factor * (piece or self._piece(*frames.shape[2:]))
        # The first frame alone is a latent, with nothing before it that needs to be computed.
        rest = torch.split(frames[1:], at_once) if len(frames) > 1 else ()
        parts = [
            self.encoder(part.to(self.device, self.dtype), stream) for part in (frames[:1], *rest)
        ]
        moments = self.quant_conv(torch.cat(parts))
        mode = moments[:, : self.config.z_dim].transpose(0, 1).float()
        mean, std = self._statistics(mode.device)
        normalised: Tensor = (mode - mean) / std
        return normalised

    def decode(self, latents: Tensor, piece: int | None = None) -> Tensor:
        """Normalised latents [z, T, h, w] to pixels in [-1, 1], float32 [3, 1 + 4(T - 1), H, W].

        `piece` as for `encode`.
        """
        pieces = [self.pixels(patches) for patches in self.decoded(latents, piece)]
        return torch.cat(pieces).transpose(0, 1)

    def decoded(self, latents: Tensor, piece: int | None = None) -> Iterator[Tensor]:
        """The patches of a clip's frames [frames, C, H, W], piece by piece, for `pixels`."""
        mean, std = self._statistics(latents.device)
        z = (latents.float() * std + mean).transpose(0, 1).to(self.device, self.dtype)
        z = self.post_quant_conv(z.contiguous(memory_format=torch.channels_last))
        stream = Stream()
        height, width = (side * self.config.spatial_factor for side in z.shape[2:])
        for part in torch.split(z, piece or self._piece(height, width)):
            yield self.decoder(part, stream)

    def pixels(self, patches: Tensor) -> Tensor:
        """Frames [frames, 3, H, W] of their patches, float32 in [-1, 1]."""
        return from_patches(patches.float(), self.config.patch).clamp_(-1, 1)

    def _piece(self, height: int, width: int) -> int:
        return max(1, PIECE_PIXELS // (self.config.temporal_factor * height * width))

    def _statistics(self, device: torch.device) -> tuple[Tensor, Tensor]:
        shape = (-1, 1, 1, 1)
        mean = torch.tensor(self.config.latents_mean, device=device).view(shape)
        return mean, torch.tensor(self.config.latents_std, device=device).view(shape)
