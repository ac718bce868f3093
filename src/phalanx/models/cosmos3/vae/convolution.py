"""Convolutions over frames, causal in time.

Frames are the batch [frames, C, H, W] with channels last in memory, and the taps in time are input
channels of a plain 2-D convolution: on one CPU thread that takes a tenth to nine tenths of the time
of a 3-D one, and it has kernels of every dtype on CUDA.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from phalanx.models.cosmos3.vae.stream import Stream


class FrameConv(nn.Module):
    """A convolution of each frame on its own: kernel `size`, zeros around it, or none if `stride` 2.

    A checkpoint has its weight with `axes` axes, of which those that are not these 4 are of 1.
    """

    def __init__(
        self, inputs: int, outputs: int, size: int = 1, *, stride: int = 1, axes: int = 4
    ) -> None:
        super().__init__()
        self.weight = _weight(outputs, inputs, size)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False)
        self.stored_shape = (outputs, inputs, *([1] * (axes - 4)), size, size)
        self._padding, self._stride = (size // 2 if stride == 1 else 0), stride

    def place_weight(self, stored: Tensor) -> None:
        """Take the weight as a checkpoint has it, of `stored_shape`."""
        self.weight.copy_(stored.reshape(self.weight.shape))

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(x, self.weight, self.bias, self._stride, self._padding)


class CausalConv(nn.Module):
    """A convolution of `taps` frames, the newest of them its own, and `size` x `size` pixels.

    With `stride` 2 in time it takes every second frame, the first of them with all its taps inside
    what it is given: whoever calls it then gives the frames before.
    """

    def __init__(
        self, inputs: int, outputs: int, size: int = 3, *, taps: int = 3, stride: int = 1
    ) -> None:
        super().__init__()
        self.weight = _weight(outputs, taps * inputs, size)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False)
        self.stored_shape = (outputs, inputs, taps, size, size)
        self._inputs, self._taps, self._size, self._stride = inputs, taps, size, stride

    def place_weight(self, stored: Tensor) -> None:
        """Take the weight as a checkpoint has it, [outputs, inputs, taps, size, size]."""
        self.weight.copy_(stored.transpose(1, 2).flatten(1, 2))

    def forward(self, x: Tensor, stream: Stream) -> Tensor:
        """As many frames as in `x`, which go on where `stream` ended."""
        at_beginning = not stream.begun(self)
        whole = stream.behind(self, x, self._taps - 1)
        if at_beginning and len(x) == 1:
            # Before the first frame there is nothing, so the other taps add nothing.
            newest = self.weight[:, (self._taps - 1) * self._inputs :]
            return functional.conv2d(x, newest, self.bias, padding=self._size // 2)
        return self.over(whole)

    def over(self, whole: Tensor) -> Tensor:
        """The frames of `whole` that have all their taps inside it."""
        last = len(whole) - self._taps + 1
        taps = [whole[tap : tap + last : self._stride] for tap in range(self._taps)]
        return functional.conv2d(
            torch.cat(taps, 1), self.weight, self.bias, padding=self._size // 2
        )


def _weight(outputs: int, inputs: int, size: int) -> nn.Parameter:
    weight = torch.empty(outputs, inputs, size, size).to(memory_format=torch.channels_last)
    return nn.Parameter(weight, requires_grad=False)
