"""A diffusion time as a vector: cosines, then sines, of it at 128 frequencies, through two layers.

Formula: Vaswani et al. 2017, as DiT (Peebles and Xie 2022) uses it. In float32 whatever the model's
dtype. What follows from a time depends on no request, and is kept.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from phalanx.layers.linear import Linear

NUM_FREQUENCIES = 128
_LONGEST_PERIOD = 10000.0
_MOST_KEPT = 256


class TimeEmbedding(nn.Module):
    """Vectors [width] in `dtype` by a schedule's whole timesteps."""

    def __init__(self, width: int, scale: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = _linear(2 * NUM_FREQUENCIES, width)
        self.second = _linear(width, width)
        self._scale = scale
        self._dtype = dtype
        self._known: OrderedDict[int, Tensor] = OrderedDict()

    def forward(self, timestep: int) -> Tensor:
        """The vector of `timestep`; nobody may change it."""
        found = self._known.get(timestep)
        if found is None:
            found = self._compute(timestep)
            if len(self._known) >= _MOST_KEPT:
                self._known.popitem(last=False)
            self._known[timestep] = found
        else:
            self._known.move_to_end(timestep)
        return found

    def forget(self) -> None:
        """The weights have changed."""
        self._known.clear()

    def features(self, timestep: int) -> Tensor:
        """Float32 [1, 256]."""
        exponents = torch.arange(NUM_FREQUENCIES, dtype=torch.float32) / NUM_FREQUENCIES
        frequencies = torch.exp(-math.log(_LONGEST_PERIOD) * exponents)
        time = torch.tensor([timestep], dtype=torch.float32) * self._scale
        angles = time[:, None] * frequencies
        return torch.cat((angles.cos(), angles.sin()), dim=-1)

    def _compute(self, timestep: int) -> Tensor:
        assert self.first.bias is not None
        features = self.features(timestep).to(self.first.bias.device)
        inner = functional.silu(self.first.forward(features))
        return self.second.forward(inner)[0].to(self._dtype)


def _linear(in_features: int, out_features: int) -> Linear:
    return Linear(in_features, out_features, bias=True, dtype=torch.float32, device="meta")
