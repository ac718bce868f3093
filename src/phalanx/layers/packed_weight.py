"""A linear layer's weight in a form that its kernel reads faster than the plain matrix.

A packed weight is immutable and private to its process: after a weight update it is packed again.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class PackedWeight(Protocol):
    """A weight `[out, in]` prepared for one kernel."""

    @property
    def num_bytes(self) -> int:
        """Memory that the packed form holds."""
        ...

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias` of `x` [T, in], in the dtype of `x`."""
        ...

    def dense(self) -> Tensor:
        """The plain matrix, in the dtype it was packed from; exact unless packing rounds."""
        ...
