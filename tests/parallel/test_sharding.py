"""How layers are cut: every part is held once, and attention heads stay with their KV heads."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import ConfigurationError
from phalanx.parallel.sharding import (
    HeadShard,
    Span,
    merged_spans,
    qkv_spans,
    query_span,
    shard_heads,
    split_sizes,
    split_span,
)


@pytest.mark.parametrize(
    ("total", "parts", "sizes"),
    [(8, 2, (4, 4)), (9, 2, (5, 4)), (3, 4, (1, 1, 1, 0)), (10, 4, (3, 3, 2, 2)), (0, 2, (0, 0))],
)
def test_a_split_is_balanced(total, parts, sizes):
    assert split_sizes(total, parts) == sizes


@given(total=st.integers(0, 1000), parts=st.integers(1, 40))
def test_parts_follow_one_another_and_cover_the_whole(total, parts):
    sizes = split_sizes(total, parts)
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    end = 0
    for index in range(parts):
        span = split_span(total, parts, index)
        assert (span.start, span.size) == (end, sizes[index])
        end = span.stop
    assert end == total


def test_merged_projections_are_cut_one_by_one():
    assert merged_spans((5, 5), 2, 0) == (Span(0, 3), Span(5, 8))
    assert merged_spans((5, 5), 2, 1) == (Span(3, 5), Span(8, 10))
    assert merged_spans((2, 4, 6), 2, 1) == (Span(1, 2), Span(4, 6), Span(9, 12))


@pytest.mark.parametrize(
    ("size", "shards"),
    [
        (1, [(0, 9, 0, 3)]),
        (2, [(0, 6, 0, 2), (6, 3, 2, 1)]),
        (3, [(0, 3, 0, 1), (3, 3, 1, 1), (6, 3, 2, 1)]),
        (4, [(0, 2, 0, 1), (2, 1, 0, 1), (3, 3, 1, 1), (6, 3, 2, 1)]),
        (9, [(head, 1, head // 3, 1) for head in range(9)]),
    ],
)
def test_9_query_heads_over_3_kv_heads(size, shards):
    found = [shard_heads(9, 3, size, rank) for rank in range(size)]
    assert found == [HeadShard(*shard) for shard in shards]


def test_one_kv_head_is_shared_by_all_ranks():
    assert [shard_heads(8, 1, 4, rank) for rank in range(4)] == [
        HeadShard(2 * rank, 2, 0, 1) for rank in range(4)
    ]


@given(kv=st.integers(1, 12), group=st.integers(1, 8), data=st.data())
def test_every_query_head_is_held_once_with_its_kv_head(kv, group, data):
    heads = kv * group
    size = data.draw(st.integers(1, heads))
    held = []
    for rank in range(size):
        shard = shard_heads(heads, kv, size, rank)
        assert shard.num_heads % shard.num_kv_heads == 0
        assert 0 <= shard.kv_start <= kv - shard.num_kv_heads
        local_group = shard.num_heads // shard.num_kv_heads
        for local in range(shard.num_heads):
            query = shard.query_start + local
            assert shard.kv_start + local // local_group == query // group
            held.append(query)
    assert held == list(range(heads))


@given(kv=st.integers(1, 12), group=st.integers(1, 8), data=st.data())
def test_kv_heads_are_held_by_as_few_ranks_as_can_be(kv, group, data):
    size = data.draw(st.integers(1, kv * group))
    shards = [shard_heads(kv * group, kv, size, rank) for rank in range(size)]
    holders = [
        sum(s.kv_start <= head < s.kv_start + s.num_kv_heads for s in shards) for head in range(kv)
    ]
    assert sum(holders) == max(size, kv)
    assert max(holders) - min(holders) <= 1


def test_rows_of_a_fused_projection():
    shard = shard_heads(9, 3, 4, 1)
    assert qkv_spans(9, 3, 10, shard) == (Span(20, 30), Span(90, 100), Span(120, 130))
    assert query_span(shard, 10) == Span(20, 30)
    assert qkv_spans(9, 3, 10, shard_heads(9, 3, 2, 0)) == (
        Span(0, 60),
        Span(90, 110),
        Span(120, 140),
    )


def test_more_ranks_than_query_heads_are_refused():
    with pytest.raises(ConfigurationError, match="of 10 exceeds the 9 query heads; .* at most 9"):
        shard_heads(9, 3, 10, 0)


@pytest.mark.parametrize(("heads", "kv"), [(9, 2), (0, 1), (4, 0), (3, 6)])
def test_query_heads_are_a_multiple_of_kv_heads(heads, kv):
    with pytest.raises(ConfigurationError, match=f"num_heads={heads} .*num_kv_heads={kv}"):
        shard_heads(heads, kv, 1, 0)


def test_wrong_parts_are_refused():
    for call in (lambda: split_span(4, 2, 2), lambda: shard_heads(4, 2, 2, 2)):
        with pytest.raises(ConfigurationError, match="part 2 does not exist; allowed: 0 to 1"):
            call()
    with pytest.raises(ConfigurationError, match="cannot split 4 into 0 parts"):
        split_sizes(4, 0)
    with pytest.raises(ConfigurationError, match="tensor-parallel size of 0 must be positive"):
        shard_heads(4, 2, 0, 0)


def test_sharding_loads_no_torch():
    program = "import sys, phalanx.parallel.sharding; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
