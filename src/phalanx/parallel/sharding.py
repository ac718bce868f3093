"""Which part of a layer each rank of a tensor-parallel group holds: pure functions, torch-free.

Parts are balanced: they differ by at most one row (or one group of heads), the first ranks holding
the larger ones. Ranges are of rows or columns of the whole weight, so that a loader can read its
part out of a mapped file.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from phalanx.errors import ConfigurationError


class Span(NamedTuple):
    """Rows or columns `start` to `stop` (exclusive) of a whole weight."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)

    def shifted(self, by: int) -> Span:
        """The span of the same length, `by` further on."""
        return Span(self.start + by, self.stop + by)


@dataclass(frozen=True)
class WeightShard:
    """The part of a whole weight [rows, columns] that one rank holds, and of its bias [rows].

    It is the spans of `rows`, one below the other, each of the same `columns`. Where every rank
    holds all rows, one of them holds the bias.
    """

    rows: tuple[Span, ...]
    columns: Span
    holds_bias: bool = True

    @property
    def num_rows(self) -> int:
        return sum(span.size for span in self.rows)


@dataclass(frozen=True)
class HeadShard:
    """The attention heads of one rank: neighbouring query heads and the KV heads that they read.

    `num_heads` is a multiple of `num_kv_heads`, so the rank's heads group as the whole's do.
    """

    query_start: int
    num_heads: int
    kv_start: int
    num_kv_heads: int


def split_sizes(total: int, parts: int) -> tuple[int, ...]:
    """`total` as `parts` sizes that differ by at most one, the larger first."""
    if parts < 1 or total < 0:
        raise ConfigurationError(
            f"cannot split {total} into {parts} parts; both must be whole numbers, parts positive"
        )
    least, larger = divmod(total, parts)
    return (least + 1,) * larger + (least,) * (parts - larger)


def split_span(total: int, parts: int, index: int) -> Span:
    """The part `index` of `total` rows split by `split_sizes`."""
    sizes = split_sizes(total, parts)
    _check_index(index, parts)
    start = sum(sizes[:index])
    return Span(start, start + sizes[index])


def merged_spans(sizes: tuple[int, ...], parts: int, index: int) -> tuple[Span, ...]:
    """Of projections stacked in one weight (gate and up), the rows of part `index` of each."""
    starts = (0, *accumulate(sizes))
    return tuple(
        split_span(size, parts, index).shifted(start)
        for start, size in zip(starts, sizes, strict=False)
    )


def shard_heads(num_heads: int, num_kv_heads: int, size: int, rank: int) -> HeadShard:
    """The heads of `rank` in a group of `size`.

    Up to one rank a KV head, a rank holds whole KV heads with all their query heads. Beyond, each
    KV head is held by several ranks, which split its query heads.
    """
    _check_heads(num_heads, num_kv_heads, size)
    _check_index(rank, size)
    group = num_heads // num_kv_heads
    if size <= num_kv_heads:
        kv = split_span(num_kv_heads, size, rank)
        return HeadShard(kv.start * group, kv.size * group, kv.start, kv.size)
    holders = split_sizes(size, num_kv_heads)
    starts = (0, *accumulate(holders))
    kv_head = max(head for head in range(num_kv_heads) if starts[head] <= rank)
    query = split_span(group, holders[kv_head], rank - starts[kv_head]).shifted(kv_head * group)
    return HeadShard(query.start, query.size, kv_head, 1)


def query_span(shard: HeadShard, head_dim: int) -> Span:
    """The rank's columns of the output projection: those of its query heads."""
    start = shard.query_start * head_dim
    return Span(start, start + shard.num_heads * head_dim)


def qkv_spans(
    num_heads: int, num_kv_heads: int, head_dim: int, shard: HeadShard
) -> tuple[Span, Span, Span]:
    """The rank's rows of a fused projection [(queries, keys, values), width], in that order."""
    start = shard.kv_start * head_dim
    kv = Span(start, start + shard.num_kv_heads * head_dim)
    keys_at = num_heads * head_dim
    values_at = keys_at + num_kv_heads * head_dim
    return query_span(shard, head_dim), kv.shifted(keys_at), kv.shifted(values_at)


def _check_heads(num_heads: int, num_kv_heads: int, size: int) -> None:
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        raise ConfigurationError(
            f"num_heads={num_heads} must be a positive multiple of num_kv_heads={num_kv_heads}"
        )
    if size > num_heads:
        raise ConfigurationError(
            f"an attention tensor-parallel size of {size} exceeds the {num_heads} query heads; "
            f"each rank needs one, so choose at most {num_heads}"
        )
    if size < 1:
        raise ConfigurationError(f"a tensor-parallel size of {size} must be positive")


def _check_index(index: int, parts: int) -> None:
    if not 0 <= index < parts:
        raise ConfigurationError(f"part {index} does not exist; allowed: 0 to {parts - 1}")
