"""Convolutions over frames, causal in time.

Frames are the batch [frames, C, H, W] with channels last in memory, and each tap in time is a plain
2-D convolution. On a CPU that runs at the speed of matrices where a 3-D one of few channels or
frames does not, nothing is copied, and nothing is computed of the zeros before a clip.
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

    With `stride` 2 in time it takes every second frame, see `inside`.
    """

    def __init__(
        self, inputs: int, outputs: int, size: int = 3, *, taps: int = 3, stride: int = 1
    ) -> None:
        super().__init__()
        # The oldest first.
        self.weights = nn.ParameterList(_weight(outputs, inputs, size) for _ in range(taps))
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False)
        self.stored_shape = (outputs, inputs, taps, size, size)
        self._padding, self._stride = size // 2, stride

    def place_weight(self, stored: Tensor) -> None:
        """Take the weight as a checkpoint has it, [outputs, inputs, taps, size, size]."""
        for tap, weight in enumerate(self.weights):
            weight.copy_(stored[:, :, tap])

    def forward(self, x: Tensor, stream: Stream) -> Tensor:
        """As many frames as in `x`, which go on where `stream` ended."""
        before = stream.passed(self, x, len(self.weights) - 1)
        out = functional.conv2d(x, self.weights[-1], self.bias, padding=self._padding)
        for back, weight in enumerate(reversed(self.weights[:-1]), start=1):
            # Nothing is added to the first frames of a clip, which have only zeros so far back.
            missing = max(0, back - len(before))
            older = before[len(before) - back + missing :][: max(0, len(x) - missing)]
            if len(older):
                out[missing : missing + len(older)] += self._tap(older, weight)
            if len(x) > back:
                out[back:] += self._tap(x[:-back], weight)
        return out

    def inside(self, whole: Tensor) -> Tensor:
        """Of the frames of `whole` that have all their taps inside it, each `stride`-th."""
        last = len(whole) - len(self.weights) + 1
        parts = [whole[tap : tap + last : self._stride] for tap in range(len(self.weights))]
        out = functional.conv2d(parts[-1], self.weights[-1], self.bias, padding=self._padding)
        for part, weight in zip(parts[:-1], self.weights[:-1], strict=True):
            out += self._tap(part, weight)
        return out

    def _tap(self, frames: Tensor, weight: Tensor) -> Tensor:
        return functional.conv2d(frames, weight, padding=self._padding)


def _weight(outputs: int, inputs: int, size: int) -> nn.Parameter:
    weight = torch.empty(outputs, inputs, size, size).to(memory_format=torch.channels_last)
    return nn.Parameter(weight, requires_grad=False)
