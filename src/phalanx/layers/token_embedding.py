"""A table of token vectors."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class TokenEmbedding(nn.Module):
    """Rows of `weight` [vocabulary, width], made on the meta device.

    torch's own embedding fills itself at random, which on `meta` imports torch's compiler: seconds.
    """

    def __init__(self, vocab_size: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        weight = torch.empty(vocab_size, width, dtype=dtype, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """`token_ids` int64 [T]."""
        return functional.embedding(token_ids, self.weight)
