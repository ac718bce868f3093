"""The two ends of a language model cut over the vocabulary: token embeddings and logits.

Both hold the same rows of the vocabulary on a rank, so that they can share one weight.
"""

from __future__ import annotations

from torch import Tensor, nn

from phalanx.parallel.current import find_group
from phalanx.parallel.linear import require_parts
from phalanx.parallel.local import (
    DenseEmbedding,
    DenseLinear,
    EmbeddingFactory,
    LinearFactory,
    LocalEmbedding,
    LocalLinear,
)
from phalanx.parallel.mesh import Group
from phalanx.parallel.ops import all_gather, all_reduce_
from phalanx.parallel.sharding import Span, WeightShard, split_sizes, split_span


class VocabParallelEmbedding(nn.Module):
    """Rows of a table [vocabulary, width]: token ids int64 [...] to [..., width] on every rank.

    The rank that holds a token's row gives it, the others zeros.
    """

    local: LocalEmbedding

    def __init__(
        self,
        vocab_size: int,
        width: int,
        *,
        group: Group | str = "dense_tp",
        local: EmbeddingFactory = DenseEmbedding,
    ) -> None:
        super().__init__()
        self.group = find_group(group, None)
        require_parts("vocab_size", vocab_size, self.group)
        self.rows = split_span(vocab_size, self.group.size, self.group.rank)
        self.shard = WeightShard((self.rows,), Span(0, width))
        self.local = local(self.rows.size, width)

    def forward(self, token_ids: Tensor) -> Tensor:
        if self.group.collectives is None:
            return self.local.forward(token_ids)
        elsewhere = (token_ids < self.rows.start) | (token_ids >= self.rows.stop)
        x = self.local.forward((token_ids - self.rows.start).masked_fill_(elsewhere, 0))
        return all_reduce_(x.masked_fill_(elsewhere.unsqueeze(-1), 0), self.group)


class VocabParallelHead(nn.Module):
    """Logits over the vocabulary: `x` [..., width] to [..., vocabulary] on every rank."""

    local: LocalLinear

    def __init__(
        self,
        width: int,
        vocab_size: int,
        *,
        group: Group | str = "dense_tp",
        local: LinearFactory = DenseLinear,
    ) -> None:
        super().__init__()
        self.group = find_group(group, None)
        require_parts("vocab_size", vocab_size, self.group)
        self.rows = split_span(vocab_size, self.group.size, self.group.rank)
        self.shard = WeightShard((self.rows,), Span(0, width))
        self.local = local(width, self.rows.size, bias=False)
        self._sizes = split_sizes(vocab_size, self.group.size)

    def local_logits(self, x: Tensor) -> Tensor:
        """Logits of this rank's `rows` of the vocabulary alone."""
        return self.local.forward(x)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.local.forward(x)
        if self.group.collectives is None:
            return logits
        return all_gather(logits, self.group, -1, sizes=self._sizes)
