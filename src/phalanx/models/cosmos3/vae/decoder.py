"""The decoder: latents to frames."""

from __future__ import annotations

from torch import Tensor, nn

from phalanx.models.cosmos3.vae.blocks import ChannelNorm, MidBlock
from phalanx.models.cosmos3.vae.config import VaeConfig
from phalanx.models.cosmos3.vae.convolution import CausalConv
from phalanx.models.cosmos3.vae.stream import Stream
from phalanx.models.cosmos3.vae.upsampling import UpBlock


class Decoder(nn.Module):
    """Takes a clip's latents in pieces of any number."""

    def __init__(self, config: VaeConfig) -> None:
        super().__init__()
        dims = config.decoder_dims
        self.conv_in = CausalConv(config.z_dim, dims[0])
        self.mid_block = MidBlock(dims[0])
        in_time = reversed(config.temperal_downsample)
        doubles = (*((True, twice) for twice in in_time), (False, False))
        self.up_blocks = nn.ModuleList(
            UpBlock(inputs, outputs, config.num_res_blocks + 1, double)
            for inputs, outputs, double in zip(dims, dims[1:], doubles, strict=False)
        )
        self.norm_out = ChannelNorm(dims[-1])
        self.conv_out = CausalConv(dims[-1], config.out_channels)

    def forward(self, latents: Tensor, stream: Stream) -> Tensor:
        """[latents, z_dim, h, w] to the patches of their frames; 1 frame of the clip's first latent,
        and 4 of each other.
        """
        x = self.mid_block(self.conv_in(latents, stream), stream)
        for block in self.up_blocks:
            x = block(x, stream)
        out: Tensor = self.conv_out(self.norm_out.activated(x), stream)
        stream.go_on()
        return out
