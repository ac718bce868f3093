"""What one rank computes by itself inside a parallel layer: any linear layer or embedding that a
model brings, or the plain ones here.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional


class LocalLinear(Protocol):
    """`x @ weight.T + bias` of `x` [..., in]."""

    def forward(self, x: Tensor) -> Tensor: ...


class LinearFactory(Protocol):
    """Makes the linear layer of one rank's sizes; its dtype and device are the factory's matter."""

    def __call__(self, in_features: int, out_features: int, *, bias: bool) -> LocalLinear: ...


class LocalEmbedding(Protocol):
    """Rows of a weight [rows, width] by `ids` int64."""

    def forward(self, ids: Tensor) -> Tensor: ...


class EmbeddingFactory(Protocol):
    """Makes the embedding of one rank's rows."""

    def __call__(self, num_embeddings: int, width: int) -> LocalEmbedding: ...


class DenseLinear(nn.Module):
    """A plain matrix, made uninitialized."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.weight = _uninitialized(out_features, in_features, dtype=dtype, device=device)
        if bias:
            self.bias = _uninitialized(out_features, dtype=dtype, device=device)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class DenseEmbedding(nn.Module):
    """A plain table, made uninitialized."""

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        width: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.weight = _uninitialized(num_embeddings, width, dtype=dtype, device=device)

    def forward(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.weight)


def _uninitialized(
    *shape: int, dtype: torch.dtype | None, device: torch.device | str | None
) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)
