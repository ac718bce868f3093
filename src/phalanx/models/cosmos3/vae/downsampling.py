"""How a level of the encoder halves its frames: a convolution, and the means of blocks beside it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from phalanx.models.cosmos3.vae.blocks import ResBlock
from phalanx.models.cosmos3.vae.convolution import CausalConv, FrameConv
from phalanx.models.cosmos3.vae.stream import Stream


class Downsampler(nn.Module):
    """Half the pixels each way, and half the frames behind the first where `in_time`."""

    def __init__(self, channels: int, *, in_time: bool) -> None:
        super().__init__()
        self.spatial = FrameConv(channels, channels, 3, stride=2)
        self.time_conv: CausalConv | None = None
        if in_time:
            self.time_conv = CausalConv(channels, channels, 1, stride=2)

    def forward(self, x: Tensor, stream: Stream) -> Tensor:
        x = self.spatial(functional.pad(x, (0, 1, 0, 1)))
        if self.time_conv is None:
            return x
        before = stream.passed(self, x, 1)
        if not stream.begins:
            return self.time_conv.inside(torch.cat((before, x)))
        # The clip's first frame passes as it is.
        return x if len(x) == 1 else torch.cat((x[:1], self.time_conv.inside(x)))


def block_means(x: Tensor, outputs: int, in_time: int, in_space: int) -> Tensor:
    """`x` in blocks of so many frames and pixels each way, whose values are averaged in groups to
    `outputs` channels; an odd number of frames gets one of zeros in front.
    """
    if len(x) % in_time:
        x = functional.pad(x, (0, 0, 0, 0, 0, 0, in_time - len(x) % in_time, 0))
    frames, channels, height, width = x.shape
    small = (frames // in_time, height // in_space, width // in_space)
    blocks = x.reshape(small[0], in_time, channels, small[1], in_space, small[2], in_space)
    # Frames, rows, columns and channels, and then what is inside a block, in that order too.
    ordered = blocks.permute(0, 3, 5, 2, 1, 4, 6)
    return ordered.reshape(*small, outputs, -1).mean(-1).permute(0, 3, 1, 2)


class DownBlock(nn.Module):
    """One level: its blocks, its downsampler unless it is the last, and the shortcut over both."""

    def __init__(
        self, inputs: int, outputs: int, num_blocks: int, halves: tuple[bool, bool]
    ) -> None:
        """`halves` are pixels, and frames."""
        super().__init__()
        widths = [inputs, *([outputs] * num_blocks)]
        self.resnets = nn.ModuleList(map(ResBlock, widths[:-1], widths[1:]))
        in_space, in_time = halves
        self.downsampler = Downsampler(outputs, in_time=in_time) if in_space else None
        self._outputs, self._factors = outputs, (1 + in_time, 1 + in_space)

    def forward(self, x: Tensor, stream: Stream) -> Tensor:
        around = block_means(x, self._outputs, *self._factors)
        for block in self.resnets:
            x = block(x, stream)
        if self.downsampler is not None:
            x = self.downsampler(x, stream)
        return x + around
