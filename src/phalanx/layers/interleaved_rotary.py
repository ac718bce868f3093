"""Rotary positions of three axes (time, height, width), whose frequencies are interleaved.

Of each three frequencies the second turns with the height and the third with the width, as long as
those have any left; all others turn with the time. Formula: Bai et al. 2025 (Qwen3-VL), interleaved
M-RoPE. Angles are float32 products of float32 positions, whatever the model's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx.layers.rotary import RopeParameters, inverse_frequencies

Rotary = tuple[Tensor, Tensor]


class InterleavedRotary(nn.Module):
    """Cosines and sines of positions, each float32 [T, head_dim / 2], for half-split rotation.

    `axes` are the numbers of frequencies of time, height and width.
    """

    frequencies: Tensor
    axis: Tensor

    def __init__(self, head_dim: int, theta: float, axes: tuple[int, int, int]) -> None:
        super().__init__()
        with torch.device("cpu"):
            frequencies = inverse_frequencies(head_dim, RopeParameters(theta=theta))
            axis = torch.zeros(head_dim // 2, dtype=torch.int64)
        for number in (1, 2):
            axis[number : 3 * axes[number] : 3] = number
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.register_buffer("axis", axis, persistent=False)

    def forward(self, positions: Tensor) -> Rotary:
        """(cos, sin) of `positions` float32 [3, T]."""
        angles = positions.t().index_select(1, self.axis) * self.frequencies
        return angles.cos(), angles.sin()

    def line(self, positions: Tensor) -> Rotary:
        """(cos, sin) of tokens that are at `positions` [T] on all axes."""
        angles = positions.float()[:, None] * self.frequencies
        return angles.cos(), angles.sin()
