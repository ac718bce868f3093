"""What a request begins with where it does not bring its own: noise, drawn on the host from its seed.

So it is the same on every rank and every device. One generator draws for the video, then the sound,
then the actions, also where a condition is kept instead.
"""

from __future__ import annotations

import torch
from torch import Tensor


class NoiseSource:
    """The noise of one request; what is drawn must be drawn in the order of the module."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def take(self, given: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """Float32 of `shape`, on the host: `given`, or drawn.

        What is given is drawn too, so that what comes behind it does not depend on it.
        """
        drawn = torch.randn(shape, generator=self._generator)
        return drawn if given is None else given.to("cpu", torch.float32).reshape(shape)
