"""The algebra of sizes: what is valid, how many ranks it means, and what each refusal says."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

import phalanx
import phalanx.engine_config as engine_config
from phalanx import settings
from phalanx.engine_config import DeviceConfig, EngineConfig, RuntimeConfig
from phalanx.errors import ConfigurationError
from phalanx.schema.parallel import (
    AttentionParallelConfig,
    DenseParallelConfig,
    MoeParallelConfig,
    OuterParallelConfig,
    ParallelConfig,
)

GUIDE = ParallelConfig(
    outer=OuterParallelConfig(cfg_size=2),
    dense=DenseParallelConfig(tp_size=4),
    attention=AttentionParallelConfig(tp_size=4),
    moe=MoeParallelConfig(tp_size=2, ep_size=2),
)
NAMES = (
    "ParallelConfig",
    "OuterParallelConfig",
    "DenseParallelConfig",
    "AttentionParallelConfig",
    "MoeParallelConfig",
)


@pytest.mark.parametrize("name", NAMES)
def test_r11_the_parallel_classes_import_from_both_places(name):
    assert name in phalanx.__all__
    assert name in engine_config.__all__
    assert getattr(phalanx, name) is getattr(engine_config, name)
    for other in ("DeviceConfig", "EngineConfig", "ResolvedParallelConfig"):
        assert other in engine_config.__all__


def test_r11_they_load_no_torch():
    program = (
        "import sys, phalanx; phalanx.ParallelConfig().resolve(2); "
        "import phalanx.engine_config; print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_r12_the_guides_example_means_8_ranks():
    assert GUIDE.infer_replica_world_size() == 8
    resolved = GUIDE.resolve(8)
    assert resolved.scope_size == 4
    assert resolved.sizes("moe") == (("tp", 2), ("ep", 2), ("dp", 1))


def test_r9_r21_it_describes_one_replica_only():
    assert {field.name for field in fields(ParallelConfig)} == {
        "outer",
        "dense",
        "attention",
        "moe",
    }
    for name in ("replica_count", "replicas"):
        with pytest.raises(TypeError, match=name):
            ParallelConfig(**{name: 2})


def test_r23_a_default_replica_is_a_single_rank():
    assert ParallelConfig().infer_replica_world_size() == 1


@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [
        (ParallelConfig(dense=DenseParallelConfig(tp_size=4)), 4),
        (ParallelConfig(outer=OuterParallelConfig(pipeline_size=2, cfg_size=3)), 6),
        (ParallelConfig(moe=MoeParallelConfig(ep_size=4)), 4),
        (
            ParallelConfig(
                dense=DenseParallelConfig(dp_size=4),
                attention=AttentionParallelConfig(cp_size=3, decode_cp_size=2),
                moe=MoeParallelConfig(ep_size=2),
            ),
            12,
        ),
        (ParallelConfig(attention=AttentionParallelConfig(decode_cp_size=2)), 2),
    ],
)
def test_r23_the_number_of_ranks_is_the_smallest_that_fits(parallel, ranks):
    assert parallel.infer_replica_world_size() == ranks


def test_an_omitted_tensor_parallel_size_takes_what_the_scope_leaves():
    resolved = ParallelConfig(
        outer=OuterParallelConfig(pipeline_size=2),
        attention=AttentionParallelConfig(cp_size=2),
        moe=MoeParallelConfig(ep_size=4),
    ).resolve(16)
    assert resolved.scope_size == 8
    assert [resolved.tp_size(name) for name in ("dense", "attention", "moe")] == [8, 4, 2]


def test_sequence_parallel_takes_no_ranks():
    dense = DenseParallelConfig(tp_size=2, sequence_parallel=True)
    assert ParallelConfig(dense=dense).infer_replica_world_size() == 2


def test_which_domains_are_tensor_parallel_only():
    assert DenseParallelConfig(tp_size=8).is_tp_only
    assert not DenseParallelConfig(dp_size=2).is_tp_only
    assert not DenseParallelConfig(sequence_parallel=True).is_tp_only
    assert AttentionParallelConfig(tp_size=8).is_tp_only
    for name in ("cp_size", "dp_size", "decode_cp_size"):
        assert not AttentionParallelConfig(**{name: 2}).is_tp_only
    assert MoeParallelConfig(tp_size=8).is_tp_only
    assert not MoeParallelConfig(ep_size=2).is_tp_only
    assert not MoeParallelConfig(dp_size=2).is_tp_only


SIZES = [
    (kind, field.name)
    for kind in (
        OuterParallelConfig,
        DenseParallelConfig,
        AttentionParallelConfig,
        MoeParallelConfig,
    )
    for field in fields(kind)
    if field.name.endswith("_size")
]


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "2"])
@pytest.mark.parametrize(("kind", "name"), SIZES, ids=lambda value: str(value))
def test_a_size_is_a_positive_integer(kind, name, value):
    with pytest.raises(ValueError, match=rf"{name}={value!r} must be a positive integer"):
        kind(**{name: value})


def test_only_a_tensor_parallel_size_may_be_left_open():
    with pytest.raises(ConfigurationError, match=r"moe\.ep_size=None must be a positive integer"):
        MoeParallelConfig(ep_size=None)
    with pytest.raises(ConfigurationError, match=r"dense\.tp_size=0 .* or None to derive it"):
        DenseParallelConfig(tp_size=0)


def test_sequence_parallel_is_a_bool():
    with pytest.raises(ConfigurationError, match=r"dense\.sequence_parallel=1 must be True or"):
        DenseParallelConfig(sequence_parallel=1)


@pytest.mark.parametrize("name", ["outer", "dense", "attention", "moe"])
def test_a_part_of_the_wrong_class_is_a_type_error(name):
    wrong = MoeParallelConfig() if name != "moe" else DenseParallelConfig()
    with pytest.raises(TypeError, match=rf"ParallelConfig\.{name} must be a \w+ParallelConfig"):
        ParallelConfig(**{name: wrong})


def test_r14_domains_of_different_size_are_refused():
    parallel = ParallelConfig(
        dense=DenseParallelConfig(tp_size=8),
        attention=AttentionParallelConfig(tp_size=2, dp_size=2),
    )
    with pytest.raises(ConfigurationError, match="imply different model-scope sizes") as caught:
        parallel.infer_replica_world_size()
    assert "dense.tp_size=8 x dense.dp_size=1 = 8 ranks" in str(caught.value)
    assert "attention.dp_size=2 = 4 ranks" in str(caught.value)
    with pytest.raises(ConfigurationError, match="= 4 ranks, but a model scope has 8"):
        parallel.resolve(8)


def test_r14_r10_the_equality_holds_within_an_outer_partition():
    parallel = ParallelConfig(
        outer=OuterParallelConfig(cfg_size=2), dense=DenseParallelConfig(tp_size=4)
    )
    assert parallel.resolve(8).scope_size == 4
    with pytest.raises(ConfigurationError, match=r"dense\.tp_size=4 .* but a model scope has 2"):
        parallel.resolve(4)


def test_other_sizes_must_divide_the_scope():
    with pytest.raises(ConfigurationError, match=r"moe\.ep_size=3 x moe\.dp_size=1 = 3 does not"):
        ParallelConfig(moe=MoeParallelConfig(ep_size=3)).resolve(8)


@pytest.mark.parametrize(
    "outer", [OuterParallelConfig(pipeline_size=3), OuterParallelConfig(cfg_size=3)]
)
def test_outer_sizes_must_divide_the_ranks(outer):
    with pytest.raises(ConfigurationError, match="= 3 does not divide the 8 ranks of a replica"):
        ParallelConfig(outer=outer).resolve(8)


def test_decode_groups_must_divide_the_attention_group():
    parallel = ParallelConfig(attention=AttentionParallelConfig(cp_size=2, decode_cp_size=2))
    with pytest.raises(ConfigurationError, match=r"decode_cp_size=2 .* tensor-parallel size 3"):
        parallel.resolve(6)
    given_size = ParallelConfig(attention=AttentionParallelConfig(tp_size=3, decode_cp_size=2))
    with pytest.raises(ConfigurationError, match=r"decode_cp_size=2 .* tensor-parallel size 3"):
        given_size.infer_replica_world_size()


@pytest.mark.parametrize("world", [0, -2, True, 1.0])
def test_the_number_of_ranks_is_a_positive_integer(world):
    with pytest.raises(ConfigurationError, match="the number of ranks of a replica="):
        ParallelConfig().resolve(world)


def test_an_unknown_domain_is_named_with_the_known_ones():
    for config in (ParallelConfig(), ParallelConfig().resolve(1)):
        assert config.domain("moe") == config.moe
        with pytest.raises(ConfigurationError, match="'cfg' .* allowed: dense, attention, moe"):
            config.domain("cfg")


def test_configurations_are_frozen_and_pickle():
    with pytest.raises(FrozenInstanceError):
        GUIDE.dense = DenseParallelConfig()
    resolved = GUIDE.resolve(8)
    assert pickle.loads(pickle.dumps((GUIDE, resolved))) == (GUIDE, resolved)
    assert hash(GUIDE) == hash(pickle.loads(pickle.dumps(GUIDE)))


small = st.integers(1, 3)


@given(
    outer=st.builds(OuterParallelConfig, pipeline_size=small, cfg_size=small),
    dense=st.builds(DenseParallelConfig, dp_size=small),
    attention=st.builds(
        AttentionParallelConfig, cp_size=small, dp_size=small, decode_cp_size=small
    ),
    moe=st.builds(MoeParallelConfig, ep_size=small, dp_size=small),
)
def test_r10_every_domain_splits_the_whole_scope(outer, dense, attention, moe):
    parallel = ParallelConfig(outer, dense, attention, moe)
    world = parallel.infer_replica_world_size()
    resolved = parallel.resolve(world)
    assert world == outer.pipeline_size * outer.cfg_size * resolved.scope_size
    for name in ("dense", "attention", "moe"):
        product = 1
        for _, size in resolved.sizes(name):
            product *= size
        assert product == resolved.scope_size
    # What was derived, given explicitly, means the same.
    same = ParallelConfig(outer, resolved.dense, resolved.attention, resolved.moe)
    assert same.infer_replica_world_size() == world


def test_an_engine_configuration_holds_the_topology():
    config = EngineConfig(device=DeviceConfig("cpu", "float32")).replace(parallel=GUIDE)
    assert config.parallel is GUIDE
    assert config.device.target == "cpu"
    runtime = RuntimeConfig(seed=3)
    assert config.replace(runtime=runtime) == EngineConfig(config.device, runtime, GUIDE)
    with pytest.raises(TypeError, match=r"EngineConfig\.parallel must be a ParallelConfig"):
        EngineConfig(parallel=DenseParallelConfig())


@pytest.mark.parametrize("name", sorted(settings.REMOVED))
def test_s1_r20_a_topology_variable_is_refused_by_name(name, monkeypatch):
    monkeypatch.setenv(f"PHALANX_{name}", "2")
    with pytest.raises(ValueError, match=rf"unset PHALANX_{name}: \w+"):
        EngineConfig.from_env(EngineConfig(device=DeviceConfig("cpu", "float32")))


def test_s1_every_refused_variable_is_named(monkeypatch):
    monkeypatch.setenv("PHALANX_TP_SIZE", "2")
    monkeypatch.setenv("PHALANX_REPLICA_COUNT", "2")
    with pytest.raises(ConfigurationError, match=r"PHALANX_TP_SIZE: .*PHALANX_REPLICA_COUNT: "):
        settings.refuse_removed()


def test_s1_the_list_holds_what_the_reference_read():
    assert settings.REMOVED.keys() >= {
        "TP_SIZE",
        "EP_SIZE",
        "SP_SIZE",
        "CP_SIZE",
        "DP_SIZE",
        "CFG_SIZE",
        "WORLD_SIZE",
        "REPLICA_COUNT",
        "REPLICA_ID",
        "WORKER_ID",
    }


def test_r20_the_launchers_variables_do_not_change_the_topology(monkeypatch):
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    base = EngineConfig(device=DeviceConfig("cpu", "float32"), parallel=GUIDE)
    assert EngineConfig.from_env(base).parallel == GUIDE
    assert ParallelConfig().infer_replica_world_size() == 1


def test_the_time_out_of_ranks_comes_from_the_environment(monkeypatch):
    base = EngineConfig(device=DeviceConfig("cpu", "float32"))
    assert EngineConfig.from_env(base).runtime.dist_timeout_s == 1800
    monkeypatch.setenv("PHALANX_DIST_TIMEOUT_S", "2.5")
    assert EngineConfig.from_env(base).runtime.dist_timeout_s == 2.5
    for wrong in ("0", "-1", "inf", "soon"):
        monkeypatch.setenv("PHALANX_DIST_TIMEOUT_S", wrong)
        with pytest.raises(ConfigurationError, match=f"PHALANX_DIST_TIMEOUT_S='{wrong}'"):
            EngineConfig.from_env(base)


@pytest.mark.parametrize("value", [0, -1, True, "1", float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["dist_timeout_s", "stall_timeout_s"])
def test_a_time_out_is_a_positive_number(name, value):
    with pytest.raises(ConfigurationError, match=rf"{name}={value!r} must be a positive number"):
        RuntimeConfig(**{name: value})
