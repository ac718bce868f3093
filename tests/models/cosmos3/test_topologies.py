"""Which parallelism Cosmos3 takes; everything else is refused in words, before a process starts."""

from __future__ import annotations

import pytest

from phalanx import Engine, EngineArgs
from phalanx.engine_config import DeviceConfig, EngineConfig
from phalanx.errors import ConfigurationError
from phalanx.models.cosmos3.entry import Cosmos3, Cosmos3Policy
from phalanx.schema.deployment import DeploymentConfig
from phalanx.schema.parallel import (
    AttentionParallelConfig,
    DenseParallelConfig,
    MoeParallelConfig,
    OuterParallelConfig,
    ParallelConfig,
)
from tests.engine.processes import children
from tests.models.cosmos3.in_each_rank import topology

PLUGINS = (Cosmos3, Cosmos3Policy)


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("cfg", [1, 2])
def test_r19_matching_tensor_parallelism_and_one_or_two_branches_are_taken(plugin, tp, cfg):
    plugin.validate_parallel(topology(tp, cfg))
    plugin.validate_parallel(topology(tp, cfg), tp * cfg)
    assert plugin.parallel_domains == {"cfg", "dense", "attention"}


@pytest.mark.parametrize("plugin", PLUGINS)
def test_sizes_that_are_not_given_are_those_of_the_ranks(plugin):
    plugin.validate_parallel(ParallelConfig())
    plugin.validate_parallel(ParallelConfig(), 8)
    with pytest.raises(ConfigurationError, match="dense.tp_size=3"):
        plugin.validate_parallel(ParallelConfig(), 3)


REFUSED = [
    (ParallelConfig(outer=OuterParallelConfig(cfg_size=3)), r"outer.cfg_size=3: .*to 1, or to 2"),
    (ParallelConfig(outer=OuterParallelConfig(cfg_size=4)), r"outer.cfg_size=4"),
    (ParallelConfig(outer=OuterParallelConfig(pipeline_size=2)), "pipeline_size=2"),
    (topology(3, 1), r"dense.tp_size=3 with attention.tp_size=3; .*1, 2, 4, 8"),
    (topology(16, 2), "dense.tp_size=16"),
    (ParallelConfig(moe=MoeParallelConfig(ep_size=2)), "moe"),
    (
        ParallelConfig(
            dense=DenseParallelConfig(2), attention=AttentionParallelConfig(1, cp_size=2)
        ),
        "attention is .*cp_size=2",
    ),
    (
        ParallelConfig(
            dense=DenseParallelConfig(2), attention=AttentionParallelConfig(1, dp_size=2)
        ),
        "attention is .*dp_size=2",
    ),
    (
        ParallelConfig(
            dense=DenseParallelConfig(1, dp_size=2), attention=AttentionParallelConfig(2)
        ),
        "dense is .*dp_size=2",
    ),
    (
        ParallelConfig(
            dense=DenseParallelConfig(2, sequence_parallel=True),
            attention=AttentionParallelConfig(2),
        ),
        "dense is .*sequence_parallel=True",
    ),
    (
        ParallelConfig(
            dense=DenseParallelConfig(4), attention=AttentionParallelConfig(4, decode_cp_size=2)
        ),
        "attention is .*decode_cp_size=2",
    ),
]


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize(("parallel", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_r19_everything_else_is_refused_in_words(plugin, parallel, named):
    with pytest.raises(ConfigurationError, match=named) as refused:
        plugin.validate_parallel(parallel)
    assert repr(plugin.name) in str(refused.value)


@pytest.mark.parametrize(
    ("parallel", "values", "named"),
    [
        (topology(4, 1), {}, "tensor-parallel size of 4 .* num_key_value_heads=2; allowed: 1, 2"),
        (topology(8, 2), {}, "tensor-parallel size of 8 .* allowed: 1, 2"),
        (ParallelConfig(dense=DenseParallelConfig(4)), {}, "tensor-parallel size of 4"),
        (
            topology(1, 2),
            {"max_batch_size": 4, "max_text_tokens": 8, "pool_tokens": 63},
            "pool_tokens=63 with cfg_size=2: .*at least 64",
        ),
    ],
)
def test_r19_what_this_checkpoint_cannot_do_is_refused_before_a_process_starts(
    folders, parallel, values, named
):
    before = children()
    args = Cosmos3.args_cls(folders["silu"], **values)
    config = EngineConfig(DeviceConfig("cpu", "float32"), parallel=parallel)
    Engine.register(Cosmos3)
    with pytest.raises(ConfigurationError, match=named):
        Engine(EngineArgs("cosmos3", args, config), deployment=DeploymentConfig.local())
    assert children() == before
    Cosmos3.validate_args(args, topology(2, 1))
    Cosmos3.validate_args(Cosmos3.args_cls("elsewhere"), parallel)


def test_r16_nothing_is_started_for_a_topology_that_is_refused():
    before = children()
    args = Cosmos3.args_cls("nowhere")
    config = EngineConfig(DeviceConfig("cpu", "float32"), parallel=topology(3, 1))
    Engine.register(Cosmos3)
    with pytest.raises(ConfigurationError, match="dense.tp_size=3"):
        Engine(EngineArgs("cosmos3", args, config), deployment=DeploymentConfig.local())
    assert children() == before
