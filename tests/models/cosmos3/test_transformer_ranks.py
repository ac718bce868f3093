"""The transformer over two ranks, real processes over gloo: one rank's results, on both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phalanx.device.operators.torch_operators import TorchOperators
from phalanx.errors import ConfigurationError
from phalanx.models.cosmos3.checkpoint import read_config
from phalanx.models.cosmos3.config import Cosmos3Config
from phalanx.models.cosmos3.media import Velocity
from phalanx.models.cosmos3.transformer import Cosmos3Transformer
from phalanx.parallel.collectives.base import ReduceOp
from phalanx.parallel.mesh import Group
from phalanx.parallel.ranks import Ranks
from tests.models.cosmos3.standing_in import (
    CPU,
    TOLERANCE,
    Forward,
    errors,
    known_ids,
    known_row,
    loaded,
)
from tests.models.in_each_rank import join_all_ranks
from tests.parallel.rank_pool import RankPool


@pytest.fixture(scope="module")
def two_ranks():
    pool = RankPool(2)
    yield pool
    pool.close()


class Counted:
    """The one collective that a forward makes, counted."""

    device_type = "cpu"

    def __init__(self, group: Group) -> None:
        self.num_calls = 0
        self._collectives = group.collectives

    def all_reduce_(self, x, op: ReduceOp) -> None:
        self.num_calls += 1
        self._collectives.all_reduce_(x, op)


def counted_ranks() -> tuple[Ranks, Counted, Counted]:
    mesh = join_all_ranks()
    groups = [mesh.group(name) for name in ("dense_tp", "attention_tp")]
    counts = [Counted(group) for group in groups]
    dense, attention = (
        replace(group, collectives=count) for group, count in zip(groups, counts, strict=True)
    )
    return Ranks(dense, attention), *counts


def one_forward(directory: Path, family: str):
    """What this rank computes, how often it talked, how much it holds."""
    ranks, dense, attention = counted_ranks()
    transformer = loaded(directory, ranks=ranks)
    run = Forward.of(transformer, known_ids(family), known_row(family))
    run.read()
    to_read = dense.num_calls, attention.num_calls
    run.memory.layers.clear()
    velocity = run.run()
    of_both = dense.num_calls - 2 * to_read[0], attention.num_calls - 2 * to_read[1]
    heads = transformer.num_heads, transformer.num_kv_heads
    return vars(velocity), to_read, of_both, heads


@pytest.mark.parametrize("family", ["silu", "relu2"])
def test_two_ranks_compute_what_one_does(two_ranks, folders, family):
    results = two_ranks.run(one_forward, folders[family], family)
    (velocity, *counts), (other, *other_counts) = results
    found = errors(Velocity(**velocity), family)
    assert max(found.values()) < TOLERANCE
    for name, x in velocity.items():
        assert torch.equal(x, other[name]), name
    # One for the attention and one for the feed-forward of each layer; the last of text has none.
    assert counts == [(2, 2), (3, 3), (2, 1)]
    assert other_counts == counts


def ranks_of(size: int, rank: int) -> Ranks:
    """A rank of so many, which talks to none."""
    group = Group("dense_tp", tuple(range(size)), rank, CPU, None)
    return Ranks(group, replace(group, name="attention_tp"))


NANO = Cosmos3Config()
SUPER = Cosmos3Config(
    hidden_size=5120, num_hidden_layers=64, num_attention_heads=64, intermediate_size=25600
)


@pytest.mark.parametrize(
    ("config", "size", "heads", "kv_heads", "inner"),
    [
        (NANO, 2, 16, 4, 6144),
        (NANO, 4, 8, 2, 3072),
        (NANO, 8, 4, 1, 1536),
        (SUPER, 2, 32, 4, 12800),
        (SUPER, 4, 16, 2, 6400),
        (SUPER, 8, 8, 1, 3200),
    ],
)
def test_what_a_rank_of_the_published_models_holds(config, size, heads, kv_heads, inner):
    two_layers = replace(config, num_hidden_layers=2)
    model = Cosmos3Transformer(
        two_layers, TorchOperators(), torch.bfloat16, ranks_of(size, size - 1)
    )
    assert (model.num_heads, model.num_kv_heads) == (heads, kv_heads)
    for layer in (*model.text_blocks(), *model.media_blocks()):
        assert layer.qkv.weight.shape == ((heads + 2 * kv_heads) * 128, config.hidden_size)
        assert layer.output.local.weight.shape == (config.hidden_size, heads * 128)
        assert layer.mlp.widen.weight.shape == (2 * inner, config.hidden_size)
        assert layer.mlp.down.local.weight.shape == (config.hidden_size, inner)
    kv = model.last_text_layer.kv.weight
    assert kv.shape == (2 * kv_heads * 128, config.hidden_size)


@pytest.mark.parametrize(("config", "billions"), [(NANO, 15.17), (SUPER, 64.02)])
def test_the_published_models_have_as_many_numbers_as_they_should(config, billions):
    model = Cosmos3Transformer(config, TorchOperators(), torch.bfloat16, ranks_of(1, 0))
    held = sum(x.numel() for x in model.parameters())
    width = config.hidden_size
    dead = config.vocab_size * width + 2 * width + config.head_dim
    dead += 2 * config.q_rows * width + 3 * config.intermediate_size * width
    assert (held + dead) / 1e9 == pytest.approx(billions, abs=0.005)


def test_ranks_that_the_heads_do_not_divide_by_are_refused(folders):
    ranks = ranks_of(4, 1)
    with pytest.raises(
        ConfigurationError, match="size of 4 .* num_key_value_heads=2; allowed: 1, 2"
    ):
        Cosmos3Transformer(read_config(folders["silu"]), TorchOperators(), torch.float32, ranks)


@pytest.mark.parametrize("family", ["silu", "relu2"])
def test_two_ranks_hold_the_whole_and_each_number_once(folders, family):
    """Each cut matrix of both ranks put together; the rest is on both."""
    models = [loaded(folders[family], ranks=ranks_of(2, rank)) for rank in (0, 1)]
    whole = loaded(folders[family])
    for first, second, alone in zip(
        models[0].media_blocks(), models[1].media_blocks(), whole.media_blocks(), strict=True
    ):
        parts = [one.mlp.down.local.dense_weight() for one in (first, second)]
        assert torch.equal(torch.cat(parts, dim=1), alone.mlp.down.local.dense_weight())
        outputs = [one.output.local for one in (first, second)]
        together = torch.cat([one.dense_weight() for one in outputs], dim=1)
        assert torch.equal(together, alone.output.local.dense_weight())
        queries = [one.qkv.dense_weight()[:32] for one in (first, second)]
        assert torch.equal(torch.cat(queries), alone.qkv.dense_weight()[:64])
        assert (outputs[1].bias is None) and (outputs[0].bias is None) == (family == "silu")
