"""Linear layers cut over the ranks of a tensor-parallel group.

A column-parallel layer gives each rank some of the outputs; a row-parallel layer takes some of the
inputs on each rank and adds the ranks' results up. So a pair of them needs one collective. `local`
makes what a rank computes by itself; `shard` says which part of the whole weight that holds. In a
group of one, `forward` is the local layer's.
"""

from __future__ import annotations

from torch import Tensor, nn

from phalanx.errors import ConfigurationError
from phalanx.parallel.collectives.base import ReduceOp
from phalanx.parallel.current import find_group
from phalanx.parallel.local import DenseLinear, LinearFactory, LocalLinear
from phalanx.parallel.mesh import Group
from phalanx.parallel.ops import all_gather, all_reduce_, reduce_scatter
from phalanx.parallel.sharding import (
    HeadShard,
    Span,
    WeightShard,
    merged_spans,
    qkv_spans,
    query_span,
    shard_heads,
    split_sizes,
    split_span,
)


class ColumnParallelLinear(nn.Module):
    """Each rank computes some of the outputs: `x` [..., in] to [..., this rank's part of out].

    With `gather_output` every rank gets all outputs. With `sequence_parallel`, `x` holds this
    rank's tokens and is gathered along its first dimension before.
    """

    local: LocalLinear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: Group | str = "dense_tp",
        bias: bool = False,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        local: LinearFactory = DenseLinear,
    ) -> None:
        super().__init__()
        self.group = find_group(group, None)
        require_parts("out_features", out_features, self.group)
        rows = split_span(out_features, self.group.size, self.group.rank)
        self.shard = WeightShard((rows,), Span(0, in_features))
        self.local = local(in_features, rows.size, bias=bias)
        self._gather_sizes = split_sizes(out_features, self.group.size) if gather_output else None
        self._gather_tokens = sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        if self.group.collectives is None:
            return self.local.forward(x)
        if self._gather_tokens:
            x = all_gather(x, self.group, 0)
        x = self.local.forward(x)
        if self._gather_sizes is not None:
            x = all_gather(x, self.group, -1, sizes=self._gather_sizes)
        return x


class MergedColumnParallelLinear(nn.Module):
    """Several column-parallel projections of one input in one weight, such as gate and up.

    A rank holds its part of each, so its output splits into `local_sizes`.
    """

    local: LocalLinear

    def __init__(
        self,
        in_features: int,
        out_sizes: tuple[int, ...],
        *,
        group: Group | str = "dense_tp",
        bias: bool = False,
        sequence_parallel: bool = False,
        local: LinearFactory = DenseLinear,
    ) -> None:
        super().__init__()
        self.group = find_group(group, None)
        for size in out_sizes:
            require_parts("out_sizes", size, self.group)
        rows = merged_spans(out_sizes, self.group.size, self.group.rank)
        self.shard = WeightShard(rows, Span(0, in_features))
        self.local_sizes = tuple(span.size for span in rows)
        self.local = local(in_features, self.shard.num_rows, bias=bias)
        self._gather_tokens = sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        if self._gather_tokens and self.group.collectives is not None:
            x = all_gather(x, self.group, 0)
        return self.local.forward(x)


class QKVParallelLinear(nn.Module):
    """The fused projection to queries, keys and values, cut by whole heads.

    A rank's output is [..., (heads.num_heads + 2 heads.num_kv_heads) head_dim], queries first. A
    row-parallel output projection that follows takes `query_columns`.
    """

    local: LocalLinear

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        group: Group | str = "attention_tp",
        bias: bool = False,
        local: LinearFactory = DenseLinear,
    ) -> None:
        super().__init__()
        self.group = find_group(group, None)
        self.heads: HeadShard = shard_heads(
            num_heads, num_kv_heads, self.group.size, self.group.rank
        )
        rows = qkv_spans(num_heads, num_kv_heads, head_dim, self.heads)
        self.shard = WeightShard(rows, Span(0, in_features))
        self.query_columns = query_span(self.heads, head_dim)
        self.local = local(in_features, self.shard.num_rows, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.local.forward(x)


class RowParallelLinear(nn.Module):
    """Each rank takes some of the inputs; the ranks' results are added up.

    `x` holds this rank's part of the inputs: `columns`, or where None a balanced part. Every rank
    gets the whole output, or with `sequence_parallel` its share of the tokens (the first
    dimension). The bias is the first rank's, so that it is added once.
    """

    local: LocalLinear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: Group | str = "dense_tp",
        columns: Span | None = None,
        bias: bool = False,
        sequence_parallel: bool = False,
        local: LinearFactory = DenseLinear,
    ) -> None:
        super().__init__()
        self.group = find_group(group, None)
        if columns is None:
            require_parts("in_features", in_features, self.group)
            columns = split_span(in_features, self.group.size, self.group.rank)
        first = self.group.rank == 0
        self.shard = WeightShard((Span(0, out_features),), columns, holds_bias=bias and first)
        self.local = local(columns.size, out_features, bias=bias and first)
        self._scatter_tokens = sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return self.add_up(self.local.forward(x))

    def add_up(self, x: Tensor) -> Tensor:
        """The ranks' results `x` of the local layer, added up; may overwrite them."""
        if self.group.collectives is None:
            return x
        if self._scatter_tokens:
            return reduce_scatter(x, self.group, 0, ReduceOp.SUM)
        return all_reduce_(x, self.group)


def require_parts(name: str, size: int, group: Group) -> None:
    """Each rank of the group must get some of `size`."""
    if size < group.size:
        raise ConfigurationError(
            f"{name}={size} cannot be cut over the {group.size} ranks of {group.name}; each needs "
            f"at least one, so use at most {size} ranks"
        )
