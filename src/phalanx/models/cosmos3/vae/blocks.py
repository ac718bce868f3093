"""What both halves of the autoencoder are built of; all take and give [frames, C, H, W]."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from phalanx.models.cosmos3.vae.convolution import CausalConv, FrameConv
from phalanx.models.cosmos3.vae.stream import Stream

_SMALLEST_LENGTH = 1e-12


class ChannelNorm(nn.Module):
    """A pixel's channels, scaled to the length sqrt(C), times `gamma`; `axes` are the stored ones."""

    def __init__(self, channels: int, *, axes: int = 4) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(channels, 1, 1), requires_grad=False)
        self.stored_shape = (channels, *([1] * (axes - 1)))
        self._length = channels**0.5

    def place_gamma(self, stored: Tensor) -> None:
        """Take `gamma` as a checkpoint has it, of `stored_shape`."""
        self.gamma.copy_(stored.reshape(self.gamma.shape))

    def forward(self, x: Tensor) -> Tensor:
        length: Tensor = torch.linalg.vector_norm(x, dim=1, keepdim=True)
        length = length.clamp_min_(_SMALLEST_LENGTH)
        return (x / length).mul_(self.gamma * self._length)

    def activated(self, x: Tensor) -> Tensor:
        """The SiLU of it."""
        return functional.silu(self.forward(x), inplace=True)


class ResBlock(nn.Module):
    """Norm, SiLU and convolution, twice, beside a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = ChannelNorm(inputs), CausalConv(inputs, outputs)
        self.norm2, self.conv2 = ChannelNorm(outputs), CausalConv(outputs, outputs)
        self.conv_shortcut = None if inputs == outputs else FrameConv(inputs, outputs, axes=5)

    def forward(self, x: Tensor, stream: Stream) -> Tensor:
        inner = self.conv1(self.norm1.activated(x), stream)
        out: Tensor = self.conv2(self.norm2.activated(inner), stream)
        return out.add_(x if self.conv_shortcut is None else self.conv_shortcut(x))


class FrameAttention(nn.Module):
    """Attention of a frame's pixels to one another, with one head."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = ChannelNorm(channels, axes=3)
        self.to_qkv = FrameConv(channels, 3 * channels)
        self.proj = FrameConv(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        frames, channels, height, width = x.shape
        pixels = self.to_qkv(self.norm(x)).permute(0, 2, 3, 1)
        q, k, v = pixels.reshape(frames, 1, height * width, 3 * channels).chunk(3, dim=-1)
        seen = functional.scaled_dot_product_attention(q, k, v)
        pixels = seen.reshape(frames, height, width, channels).permute(0, 3, 1, 2)
        out: Tensor = self.proj(pixels)
        return out.add_(x)


class MidBlock(nn.Module):
    """The smallest level, the same in both halves."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(ResBlock(channels, channels) for _ in range(2))
        self.attentions = nn.ModuleList([FrameAttention(channels)])

    def forward(self, x: Tensor, stream: Stream) -> Tensor:
        x = self.attentions[0](self.resnets[0](x, stream))
        out: Tensor = self.resnets[1](x, stream)
        return out
