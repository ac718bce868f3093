"""What a clip has left behind in each layer when its frames come in several pieces."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Stream:
    """The last frames that each causal layer has seen of one clip.

    Before a clip's beginning all is zero, so that those frames need not be there.
    """

    def __init__(self) -> None:
        self.begins = True
        """Whether the piece that goes through the layers now is the clip's first."""
        self._frames: dict[nn.Module, Tensor] = {}

    def go_on(self) -> None:
        """A piece has gone through all layers."""
        self.begins = False

    def passed(self, layer: nn.Module, x: Tensor, depth: int) -> Tensor:
        """The frames, at most `depth`, that were before `x` [frames, C, H, W] in `layer`.

        The last `depth` up to the end of `x` are kept for the next piece.
        """
        before = self._frames.get(layer, x[:0])
        kept = x[-depth:] if len(x) >= depth else torch.cat((before, x))[-depth:]
        # A copy, or all of the piece would stay in memory.
        self._frames[layer] = kept.clone(memory_format=torch.preserve_format)
        return before
