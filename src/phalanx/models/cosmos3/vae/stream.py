"""What a clip has left behind in each layer when its frames come in several pieces."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Stream:
    """The last frames that each causal layer has seen of one clip.

    A layer that has seen none is at its beginning, before which all is zero.
    """

    def __init__(self) -> None:
        self.begins = True
        """Whether the piece that goes through the layers now is the clip's first."""
        self._frames: dict[nn.Module, Tensor] = {}

    def go_on(self) -> None:
        """A piece has gone through all layers."""
        self.begins = False

    def begun(self, layer: nn.Module) -> bool:
        """Whether `layer` has seen frames."""
        return layer in self._frames

    def behind(self, layer: nn.Module, x: Tensor, depth: int) -> Tensor:
        """`x` [frames, C, H, W] with the `depth` frames before it in front, zeros at the beginning.

        The last `depth` frames of it are kept for the next piece.
        """
        before = self._frames.get(layer)
        if before is None:
            before = x.new_zeros((depth, *x.shape[1:]))
        whole = torch.cat((before, x)).contiguous(memory_format=torch.channels_last)
        # A copy, or the whole piece would stay in memory.
        self._frames[layer] = whole[-depth:].clone(memory_format=torch.preserve_format)
        return whole
