"""Layers cut over real ranks give what the whole layer gives."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from phalanx import parallel as P
from phalanx.errors import ConfigurationError, PhalanxDistError
from phalanx.layers.linear import Linear
from phalanx.parallel.cut import cut_bias, cut_weight
from phalanx.parallel.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from phalanx.parallel.local import DenseEmbedding, DenseLinear
from phalanx.parallel.sharding import Span, WeightShard
from phalanx.parallel.vocabulary import VocabParallelEmbedding, VocabParallelHead
from phalanx.schema.parallel import ParallelConfig
from tests.parallel.rank_pool import mesh_of

WIDTH, TOKENS = 24, 8
CLOSE = partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)
DOUBLE = partial(DenseLinear, dtype=torch.float64)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def load(layer: nn.Module, weight: Tensor, bias: Tensor | None = None) -> None:
    """Give a parallel layer its part of the whole weight."""
    layer.local.weight.copy_(cut_weight(weight, layer.shard))
    if bias is not None:
        part = cut_bias(bias, layer.shard)
        if part is None:
            assert layer.local.bias is None
        else:
            layer.local.bias.copy_(part)


def _column() -> None:
    mesh = mesh_of(ParallelConfig())
    x, weight, bias = drawn(TOKENS, WIDTH, seed=0), drawn(9, WIDTH, seed=1), drawn(9, seed=2)
    whole = functional.linear(x, weight, bias)
    gathered = ColumnParallelLinear(WIDTH, 9, bias=True, gather_output=True, local=DOUBLE)
    load(gathered, weight, bias)
    CLOSE(gathered.forward(x), whole)
    local = ColumnParallelLinear(WIDTH, 9, bias=True, local=DOUBLE)
    load(local, weight, bias)
    (rows,) = local.shard.rows
    CLOSE(local.forward(x), whole[:, rows.slice])
    assert rows.size == (9 + mesh.world_size - 1 - mesh.rank) // mesh.world_size


def _mlp() -> None:
    mesh_of(ParallelConfig())
    inner = 15
    x, down_bias = drawn(TOKENS, WIDTH, seed=0), drawn(WIDTH, seed=4)
    gate_up, down = drawn(2 * inner, WIDTH, seed=1), drawn(WIDTH, inner, seed=2)
    merged = MergedColumnParallelLinear(WIDTH, (inner, inner), local=DOUBLE)
    row = RowParallelLinear(inner, WIDTH, bias=True, local=DOUBLE)
    load(merged, gate_up)
    load(row, down, down_bias)

    def act(y: Tensor, sizes: tuple[int, ...]) -> Tensor:
        gate, up = y.split(sizes, -1)
        return functional.silu(gate) * up

    hidden = act(functional.linear(x, gate_up), (inner, inner))
    CLOSE(
        row.forward(act(merged.forward(x), merged.local_sizes)),
        functional.linear(hidden, down, down_bias),
    )


def attention(qkv: Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> Tensor:
    """Causal attention of one sequence's fused projection [T, (H + 2 KV) D]; [T, H D]."""
    sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    q, k, v = (part.unflatten(-1, (-1, head_dim)).movedim(0, 1) for part in qkv.split(sizes, -1))
    out = functional.scaled_dot_product_attention(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), is_causal=True, enable_gqa=True
    )
    return out[0].movedim(0, 1).flatten(1)


def _attention(num_heads: int, num_kv_heads: int) -> tuple[int, int]:
    mesh_of(ParallelConfig())
    dim, rows = 8, (num_heads + 2 * num_kv_heads) * 8
    x = drawn(TOKENS, WIDTH, seed=0)
    weight, bias = drawn(rows, WIDTH, seed=1), drawn(rows, seed=2)
    out_weight, out_bias = drawn(WIDTH, num_heads * dim, seed=3), drawn(WIDTH, seed=4)
    qkv = QKVParallelLinear(WIDTH, num_heads, num_kv_heads, dim, bias=True, local=DOUBLE)
    out = RowParallelLinear(
        num_heads * dim,
        WIDTH,
        group="attention_tp",
        columns=qkv.query_columns,
        bias=True,
        local=DOUBLE,
    )
    load(qkv, weight, bias)
    load(out, out_weight, out_bias)
    heads = qkv.heads
    found = out.forward(attention(qkv.forward(x), heads.num_heads, heads.num_kv_heads, dim))
    attended = attention(functional.linear(x, weight, bias), num_heads, num_kv_heads, dim)
    CLOSE(found, functional.linear(attended, out_weight, out_bias))
    return heads.num_heads, heads.num_kv_heads


def _vocabulary() -> None:
    mesh = mesh_of(ParallelConfig())
    vocabulary = 31
    table, x = drawn(vocabulary, WIDTH, seed=1), drawn(TOKENS, WIDTH, seed=2)
    embedding = VocabParallelEmbedding(
        vocabulary, WIDTH, local=partial(DenseEmbedding, dtype=torch.float64)
    )
    head = VocabParallelHead(WIDTH, vocabulary, local=DOUBLE)
    load(embedding, table)
    assert head.shard == embedding.shard
    head.local.weight = embedding.local.weight
    ids = torch.arange(vocabulary)
    assert torch.equal(embedding.forward(ids), table), "embeddings are copied, not computed"
    assert torch.equal(ids, torch.arange(vocabulary)), "the ids were changed"
    assert torch.equal(embedding.forward(ids.view(1, -1)), table.unsqueeze(0))
    CLOSE(head.forward(x), x @ table.T)
    CLOSE(head.local_logits(x), (x @ table.T)[:, head.rows.slice])
    assert mesh.world_size == embedding.group.size


def _sequence_parallel() -> None:
    mesh = mesh_of(ParallelConfig())
    inner = 12
    up, down, bias = drawn(inner, WIDTH, seed=1), drawn(WIDTH, inner, seed=2), drawn(WIDTH, seed=3)
    column = ColumnParallelLinear(WIDTH, inner, sequence_parallel=True, local=DOUBLE)
    merged = MergedColumnParallelLinear(WIDTH, (inner,), sequence_parallel=True, local=DOUBLE)
    row = RowParallelLinear(inner, WIDTH, bias=True, sequence_parallel=True, local=DOUBLE)
    load(column, up)
    load(merged, up)
    load(row, down, bias)
    x = drawn(TOKENS, WIDTH, seed=0)
    whole = functional.linear(x @ up.T, down, bias)
    mine = x.chunk(mesh.world_size)[mesh.rank]
    for first in (column, merged):
        CLOSE(row.forward(first.forward(mine)), whole.chunk(mesh.world_size)[mesh.rank])


def _uneven_tokens() -> None:
    mesh_of(ParallelConfig())
    row = RowParallelLinear(12, WIDTH, sequence_parallel=True, local=DOUBLE)
    with pytest.raises(PhalanxDistError, match=r"divide dimension 0 of \(9, 24\) .* multiple of 2"):
        row.forward(drawn(9, 6, seed=0))


CHECKS = [_column, _mlp, _vocabulary, _sequence_parallel]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_two_ranks_compute_what_one_does(two_ranks, check):
    two_ranks.run(check)


@pytest.mark.long
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_four_ranks_compute_what_one_does(four_ranks, check):
    four_ranks.run(check)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_single_rank_computes_the_whole(check, alone):
    check()


def test_tokens_that_cannot_be_shared_evenly_are_refused(two_ranks):
    two_ranks.run(_uneven_tokens)


def test_9_query_and_3_kv_heads_over_two_ranks(two_ranks):
    assert two_ranks.run(_attention, 9, 3) == [(6, 2), (3, 1)]


@pytest.mark.long
def test_9_query_and_3_kv_heads_over_four_ranks(four_ranks):
    assert four_ranks.run(_attention, 9, 3) == [(2, 1), (1, 1), (3, 1), (3, 1)]


@pytest.mark.long
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 8), (8, 2), (4, 1), (6, 1)])
def test_other_groupings_of_heads_over_four_ranks(four_ranks, num_heads, num_kv_heads):
    four_ranks.run(_attention, num_heads, num_kv_heads)


def test_heads_on_a_single_rank(alone):
    assert _attention(9, 3) == (9, 3)


def _packed() -> None:
    mesh_of(ParallelConfig())
    x = drawn(TOKENS, WIDTH, seed=0).float()
    up, down = drawn(16, WIDTH, seed=1).float(), drawn(WIDTH, 16, seed=2).float()
    column = ColumnParallelLinear(WIDTH, 16, local=partial(Linear, dtype=torch.float32))
    row = RowParallelLinear(16, WIDTH, local=partial(Linear, dtype=torch.float32))
    load(column, up)
    load(row, down)
    locals_ = [m for layer in (column, row) for m in layer.modules() if isinstance(m, Linear)]
    assert locals_ == [column.local, row.local]
    for linear in locals_:
        linear.pack()
    torch.testing.assert_close(row.forward(column.forward(x)), x @ up.T @ down.T)


def test_a_models_own_linear_layer_is_what_a_rank_computes_with(two_ranks):
    two_ranks.run(_packed)


def _outputs() -> bytes:
    mesh_of(ParallelConfig())
    row = RowParallelLinear(20, WIDTH)
    load(row, drawn(WIDTH, 20, seed=2).float())
    return (
        row.forward(drawn(TOKENS, 20, seed=0).float()[:, row.shard.columns.slice]).numpy().tobytes()
    )


def test_all_ranks_get_the_same_bits(four_ranks):
    assert len(set(four_ranks.run(_outputs))) == 1


class Counting(DenseLinear):
    """Says when it is called, by `forward` or through a module's hooks."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def test_a_group_of_one_adds_nothing_to_the_local_layer(alone):
    x = torch.zeros(2, 4)
    for layer in (
        ColumnParallelLinear(4, 4, gather_output=True, local=Counting),
        MergedColumnParallelLinear(4, (2, 2), sequence_parallel=True, local=Counting),
        QKVParallelLinear(4, 2, 1, 1, local=Counting),
        RowParallelLinear(4, 4, sequence_parallel=True, local=Counting),
        VocabParallelHead(4, 4, local=Counting),
    ):
        assert layer.forward(x) is x
        assert layer.local.calls == 1


def _too_small() -> None:
    mesh_of(ParallelConfig())
    message = r"{}=3 cannot be cut over the 4 ranks of \w+; .* at most 3 ranks"
    for name, build in (
        ("out_features", lambda: ColumnParallelLinear(WIDTH, 3)),
        ("out_sizes", lambda: MergedColumnParallelLinear(WIDTH, (8, 3))),
        ("in_features", lambda: RowParallelLinear(3, WIDTH)),
        ("vocab_size", lambda: VocabParallelEmbedding(3, WIDTH)),
        ("vocab_size", lambda: VocabParallelHead(WIDTH, 3)),
    ):
        with pytest.raises(ConfigurationError, match=message.format(name)):
            build()
    with pytest.raises(ConfigurationError, match="of 4 exceeds the 3 query heads"):
        QKVParallelLinear(WIDTH, 3, 1, 8)


def test_layers_too_small_to_be_cut_are_refused(four_ranks):
    four_ranks.run(_too_small)


def test_a_layer_needs_a_mesh():
    with pytest.raises(PhalanxDistError, match="no mesh is current here"):
        ColumnParallelLinear(4, 4)


def test_parts_are_read_from_a_mapped_file(tmp_path: Path):
    weight, bias = drawn(10, 6, seed=0), drawn(10, seed=1)
    save_file({"weight": weight, "bias": bias}, tmp_path / "weights.safetensors")
    shard = WeightShard((Span(0, 2), Span(5, 8)), Span(2, 4))
    with safe_open(tmp_path / "weights.safetensors", "pt") as file:
        found = cut_weight(file.get_slice("weight"), shard)
        found_bias = cut_bias(file.get_slice("bias"), shard)
    rows = [0, 1, 5, 6, 7]
    assert torch.equal(found, weight[rows][:, 2:4])
    assert torch.equal(found_bias, bias[rows])
    assert shard.num_rows == 5


def test_neighbouring_rows_are_cut_without_a_copy():
    weight = drawn(10, 6, seed=0)
    part = cut_weight(weight, WeightShard((Span(4, 8),), Span(0, 6)))
    assert part.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    assert part.is_contiguous()


@pytest.fixture
def alone():
    """A mesh of one rank, current in the test."""
    mesh = P.create_mesh(ParallelConfig(), replica_world_size=1)
    with P.use_mesh(mesh):
        yield mesh
