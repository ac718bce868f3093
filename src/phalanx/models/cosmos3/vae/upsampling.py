"""How a level of the decoder doubles its frames: a convolution, and repeated channels beside it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from phalanx.models.cosmos3.vae.blocks import ResBlock
from phalanx.models.cosmos3.vae.convolution import CausalConv, FrameConv
from phalanx.models.cosmos3.vae.stream import Stream


class Upsampler(nn.Module):
    """Twice the pixels each way, and two frames of each behind the first where `in_time`."""

    def __init__(self, channels: int, *, in_time: bool) -> None:
        super().__init__()
        self.spatial = FrameConv(channels, channels, 3)
        self.time_conv: CausalConv | None = None
        if in_time:
            self.time_conv = CausalConv(channels, 2 * channels, 1)

    def forward(self, x: Tensor, stream: Stream) -> Tensor:
        if self.time_conv is not None:
            x = self._doubled(x, self.time_conv, stream)
        out: Tensor = self.spatial(functional.interpolate(x, scale_factor=2, mode="nearest"))
        return out

    def _doubled(self, x: Tensor, conv: CausalConv, stream: Stream) -> Tensor:
        first = x[:0]
        if stream.begins:
            # The clip's first frame passes as it is, and is no history of the others either.
            first, x = x[:1], x[1:]
        if not len(x):
            return first
        frames, channels, height, width = x.shape
        pairs = conv(x, stream).reshape(frames, 2, channels, height, width)
        return torch.cat((first, pairs.flatten(0, 1)))


def repeated(x: Tensor, outputs: int, in_time: int, in_space: int) -> Tensor:
    """`x` with each frame as so many frames, and each pixel as so many pixels each way: the values
    of such a block in its `outputs` channels are the pixel's channels, each as often as needed.
    """
    frames, channels, height, width = x.shape
    times = outputs * in_time * in_space**2 // channels
    values = x.permute(0, 2, 3, 1).repeat_interleave(times, dim=-1)
    blocks = values.reshape(frames, height, width, outputs, in_time, in_space, in_space)
    # What is inside a block comes behind its frame, row and column each.
    ordered = blocks.permute(0, 4, 1, 5, 2, 6, 3)
    large = ordered.reshape(frames * in_time, height * in_space, width * in_space, outputs)
    return large.permute(0, 3, 1, 2)


class UpBlock(nn.Module):
    """One level: its blocks, and unless it is the last its upsampler and the shortcut over both."""

    def __init__(
        self, inputs: int, outputs: int, num_blocks: int, doubles: tuple[bool, bool]
    ) -> None:
        """`doubles` are pixels, and frames."""
        super().__init__()
        widths = [inputs, *([outputs] * num_blocks)]
        self.resnets = nn.ModuleList(map(ResBlock, widths[:-1], widths[1:]))
        in_space, in_time = doubles
        self.upsampler = Upsampler(outputs, in_time=in_time) if in_space else None
        self._outputs, self._in_time = outputs, 1 + in_time

    def forward(self, x: Tensor, stream: Stream) -> Tensor:
        before = x
        for block in self.resnets:
            x = block(x, stream)
        if self.upsampler is None:
            return x
        x = self.upsampler(x, stream)
        around = repeated(before, self._outputs, self._in_time, 2)
        return x.add_(around[self._in_time - 1 :] if stream.begins else around)
