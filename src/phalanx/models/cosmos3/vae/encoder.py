"""The encoder: frames to the mean of their latents' distribution."""

from __future__ import annotations

from torch import Tensor, nn

from phalanx.models.cosmos3.vae.blocks import ChannelNorm, MidBlock
from phalanx.models.cosmos3.vae.config import VaeConfig
from phalanx.models.cosmos3.vae.convolution import CausalConv
from phalanx.models.cosmos3.vae.downsampling import DownBlock
from phalanx.models.cosmos3.vae.patches import to_patches
from phalanx.models.cosmos3.vae.stream import Stream


class Encoder(nn.Module):
    """Takes a clip in pieces: first 1 + 4k frames, then 4k, where 4 frames are a latent."""

    def __init__(self, config: VaeConfig) -> None:
        super().__init__()
        self._patch = config.patch
        dims = config.encoder_dims
        self.conv_in = CausalConv(config.in_channels, dims[0])
        halves = (*((True, in_time) for in_time in config.temperal_downsample), (False, False))
        self.down_blocks = nn.ModuleList(
            DownBlock(inputs, outputs, config.num_res_blocks, half)
            for inputs, outputs, half in zip(dims, dims[1:], halves, strict=False)
        )
        self.mid_block = MidBlock(dims[-1])
        self.norm_out = ChannelNorm(dims[-1])
        self.conv_out = CausalConv(dims[-1], 2 * config.z_dim)

    def forward(self, pixels: Tensor, stream: Stream) -> Tensor:
        """[frames, 3, H, W] to [latents, 2 * z_dim, h, w]."""
        x = self.conv_in(to_patches(pixels, self._patch), stream)
        for block in self.down_blocks:
            x = block(x, stream)
        x = self.mid_block(x, stream)
        out: Tensor = self.conv_out(self.norm_out.activated(x), stream)
        stream.go_on()
        return out
