"""Cuts many tokens into blocks for a feed-forward, whose inner values would else be large.

On a CPU a tensor of tens of megabytes is fresh memory each time, and taking it costs as much as
filling it.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

_BLOCK_VALUES = 4 * 2**20


def token_blocks(x: Tensor, inner_width: int) -> Iterator[Tensor]:
    """`x` [T, width] in views of about equal size, whole on other devices than a CPU."""
    if x.device.type != "cpu":
        yield x
        return
    count = max(1, -(-x.shape[0] * inner_width // _BLOCK_VALUES))
    size = -(-x.shape[0] // count)
    for start in range(0, x.shape[0], size):
        yield x[start : start + size]
