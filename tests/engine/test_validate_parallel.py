"""Which topologies a plugin accepts, by what it declares: decided without an instance or a device."""

from __future__ import annotations

from itertools import product

import pytest

from phalanx.engine_config import (
    AttentionParallelConfig,
    DenseParallelConfig,
    EntryArgs,
    MoeParallelConfig,
    OuterParallelConfig,
    ParallelConfig,
)
from phalanx.errors import ConfigurationError
from phalanx.plugin import BatchingEntry, Entry

Outer, Dense, Attention, Moe = (
    OuterParallelConfig,
    DenseParallelConfig,
    AttentionParallelConfig,
    MoeParallelConfig,
)
DENSE_TP2 = ParallelConfig(dense=Dense(2))
BOTH_TP2 = ParallelConfig(dense=Dense(2), attention=Attention(2))


def plugin(*domains: str, base=Entry):
    """A plugin class that declares `domains`; it is never instantiated."""
    return type("StandIn", (base,), {"name": "stand_in", "parallel_domains": frozenset(domains)})


def refused(kind, parallel, world=None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        kind.validate_parallel(parallel, world)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


class Cosmos3(Entry):
    """Declares what the guide says of Cosmos3, and tightens it."""

    name = "cosmos3_stand_in"
    args_cls = EntryArgs
    parallel_domains = frozenset({"cfg", "dense", "attention"})

    @classmethod
    def validate_parallel(cls, parallel, replica_world_size=None):
        super().validate_parallel(parallel, replica_world_size)
        if parallel.outer.cfg_size > 2:
            raise ConfigurationError("guidance has two branches")
        if not (parallel.dense.is_tp_only and parallel.attention.is_tp_only):
            raise ConfigurationError("dense and attention are split by tensor parallelism only")


@pytest.mark.parametrize("base", [Entry, BatchingEntry])
@pytest.mark.parametrize(
    "parallel",
    [
        DENSE_TP2,
        BOTH_TP2,
        ParallelConfig(dense=Dense(dp_size=2)),
        ParallelConfig(attention=Attention(cp_size=2)),
        ParallelConfig(moe=Moe(ep_size=2)),
        ParallelConfig(outer=Outer(cfg_size=2)),
        ParallelConfig(outer=Outer(pipeline_size=2)),
        ParallelConfig(dense=Dense(sequence_parallel=True)),
    ],
)
def test_r16_by_default_a_single_rank_is_all(base, parallel):
    plugin(base=base).validate_parallel(ParallelConfig())
    plugin(base=base).validate_parallel(ParallelConfig(dense=Dense(1), moe=Moe(1)), 1)
    message = refused(plugin(base=base), parallel)
    assert "'stand_in'" in message
    assert "it runs on a single rank" in message


def test_r18_ranks_beyond_what_the_topology_implies_are_refused_too():
    """A replica of two ranks under a configuration that splits nothing would compute all twice."""
    assert "model scope of 2 ranks" in refused(plugin(), ParallelConfig(), 2)
    assert "world size 2" in refused(plugin("cfg", "pipeline"), ParallelConfig(), 2)
    plugin("dense").validate_parallel(ParallelConfig(), 2)


def test_r33_dense_or_attention_must_be_declared_for_both_to_be_split():
    plugin("dense").validate_parallel(BOTH_TP2)
    plugin("attention").validate_parallel(BOTH_TP2)
    message = refused(plugin("cfg"), BOTH_TP2)
    assert "dense, attention and moe, of which none is declared" in message
    assert message.endswith("Domains that it declares: cfg")


@pytest.mark.parametrize("name", ["pipeline", "cfg"])
def test_an_outer_split_must_be_declared(name):
    parallel = ParallelConfig(outer=Outer(**{f"{name}_size": 2}))
    plugin(name).validate_parallel(parallel)
    message = refused(plugin("dense", "attention", "moe"), parallel)
    assert f"outer.{name}_size=2 splits the undeclared domain {name!r}" in message


@pytest.mark.parametrize(
    ("parallel", "reason"),
    [
        (
            ParallelConfig(dense=Dense(2), moe=Moe(ep_size=2)),
            "moe.ep_size=2 splits the undeclared domain 'moe'",
        ),
        (
            ParallelConfig(dense=Dense(2), attention=Attention(cp_size=2)),
            "attention.cp_size=2 splits the undeclared domain 'attention'",
        ),
        (
            ParallelConfig(dense=Dense(4), attention=Attention(4, decode_cp_size=2)),
            "attention.decode_cp_size=2 splits the undeclared domain 'attention'",
        ),
        (
            ParallelConfig(dense=Dense(2, dp_size=2)),
            "attention.tp_size=4 of the undeclared domain 'attention' does not follow "
            "dense.tp_size=2; moe.tp_size=4",
        ),
    ],
)
def test_an_undeclared_domain_may_only_follow(parallel, reason):
    assert reason in refused(plugin("dense"), parallel)


def test_an_undeclared_domain_follows_any_of_the_declared():
    parallel = ParallelConfig(dense=Dense(2, dp_size=2), attention=Attention(4))
    plugin("dense", "attention").validate_parallel(parallel)
    plugin("dense", "attention").validate_parallel(ParallelConfig(dense=Dense(4)))


def test_sequence_parallelism_of_an_undeclared_domain_is_refused():
    parallel = ParallelConfig(dense=Dense(2, sequence_parallel=True), attention=Attention(2))
    plugin("dense").validate_parallel(parallel)
    message = refused(plugin("attention"), parallel)
    assert "dense.sequence_parallel=True splits the undeclared domain 'dense'" in message


def test_r15_every_declared_domain_may_be_split_as_it_likes():
    everything = plugin("pipeline", "cfg", "dense", "attention", "moe")
    everything.validate_parallel(
        ParallelConfig(
            Outer(2, 2), Dense(2, 2, sequence_parallel=True), Attention(2, 2), Moe(1, 2, 2)
        )
    )


def test_r14_products_of_the_domains_must_be_equal_whatever_is_declared():
    everything = plugin("dense", "attention", "moe")
    message = refused(everything, ParallelConfig(dense=Dense(8), attention=Attention(2, dp_size=2)))
    assert "different model-scope sizes" in message
    assert "scope has 4" in refused(everything, DENSE_TP2, 4)


def test_r19_r91_cosmos3_accepts_matching_tensor_parallelism_and_guidance():
    for cfg, size in product((1, 2), (1, 2, 4)):
        whole = ParallelConfig(Outer(cfg_size=cfg), Dense(size), Attention(size))
        assert whole.infer_replica_world_size() == cfg * size
        Cosmos3.validate_parallel(whole)
        Cosmos3.validate_parallel(ParallelConfig(Outer(cfg_size=cfg), Dense(size)))


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(outer=Outer(cfg_size=3)),
        ParallelConfig(outer=Outer(pipeline_size=2)),
        ParallelConfig(dense=Dense(dp_size=2)),
        ParallelConfig(dense=Dense(2, sequence_parallel=True)),
        ParallelConfig(dense=Dense(4), attention=Attention(2, cp_size=2)),
        ParallelConfig(dense=Dense(4), attention=Attention(4, decode_cp_size=2)),
        ParallelConfig(dense=Dense(2), attention=Attention(dp_size=2)),
        ParallelConfig(dense=Dense(2), moe=Moe(ep_size=2)),
        ParallelConfig(dense=Dense(2), moe=Moe(dp_size=2)),
    ],
)
def test_r19_cosmos3_refuses_everything_else(parallel):
    refused(Cosmos3, parallel)
