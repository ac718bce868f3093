"""Which mode a deployment comes to, over every row of the table, and what a launcher may say."""

from __future__ import annotations

import pytest

from phalanx import settings
from phalanx.errors import ConfigurationError
from phalanx.schema.deployment import DeploymentConfig
from phalanx.schema.launch import Mode, choose_mode
from phalanx.schema.parallel import (
    AttentionParallelConfig,
    DenseParallelConfig,
    OuterParallelConfig,
    ParallelConfig,
)
from phalanx.settings import Launcher

AUTO, LOCAL, EXTERNAL = DeploymentConfig(), DeploymentConfig.local(), DeploymentConfig.external()
ALONE = Launcher(0, 1)


@pytest.mark.parametrize("launcher", [None, ALONE, Launcher(0, 1, 0)])
def test_r26_r29_one_rank_of_one_replica_without_devices_is_inline(launcher):
    world = ParallelConfig().infer_replica_world_size()
    assert choose_mode(AUTO, world, launcher) is Mode.INLINE
    assert Mode.INLINE == "inline"


@pytest.mark.parametrize(
    ("config", "world"),
    [
        (AUTO, 2),
        (DeploymentConfig(replica_count=2), 1),
        (DeploymentConfig(replica_count=2), 2),
        (DeploymentConfig(devices=(0,)), 1),
        (DeploymentConfig(devices=(3, 1)), 2),
    ],
)
@pytest.mark.parametrize("launcher", [None, ALONE])
def test_r27_several_ranks_or_replicas_or_any_device_is_local(config, world, launcher):
    assert choose_mode(config, world, launcher) is Mode.LOCAL


@pytest.mark.parametrize("world", [1, 2])
def test_local_is_local_even_for_a_single_rank(world):
    assert choose_mode(LOCAL, world, None) is Mode.LOCAL


@pytest.mark.parametrize(
    ("world", "launcher"),
    [(1, None), (1, ALONE), (2, Launcher(0, 2)), (4, Launcher(3, 4, 1))],
)
def test_r28_external_is_external(world, launcher):
    assert choose_mode(EXTERNAL, world, launcher) is Mode.EXTERNAL


def test_r20_a_launchers_ranks_do_not_change_the_topology():
    parallel = ParallelConfig(
        outer=OuterParallelConfig(cfg_size=2),
        dense=DenseParallelConfig(tp_size=2),
        attention=AttentionParallelConfig(tp_size=2),
    )
    with pytest.raises(
        ConfigurationError, match="WORLD_SIZE=2 of the launcher must be the 4 ranks"
    ):
        choose_mode(EXTERNAL, parallel.infer_replica_world_size(), Launcher(0, 2))


@pytest.mark.parametrize(
    ("config", "world", "launcher", "message"),
    [
        (EXTERNAL, 2, None, "mode='external' with 2 ranks a replica needs RANK and WORLD_SIZE"),
        (EXTERNAL, 2, ALONE, "WORLD_SIZE=1 of the launcher must be the 2 ranks"),
        (EXTERNAL, 1, Launcher(1, 2), "WORLD_SIZE=2 of the launcher must be the 1 rank that"),
        (EXTERNAL, 2, Launcher(0, 4), "WORLD_SIZE=4"),
        (DeploymentConfig(output_rank=1), 1, None, "output_rank=1 must be a rank of the replica"),
        (
            DeploymentConfig.local(output_rank=2),
            2,
            None,
            "output_rank=2 must be a rank of the repli",
        ),
        (DeploymentConfig.external(output_rank=2), 2, Launcher(0, 2), "output_rank=2 must be"),
    ],
)
def test_what_does_not_fit_is_refused(config, world, launcher, message):
    with pytest.raises(ConfigurationError) as caught:
        choose_mode(config, world, launcher)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "config", [AUTO, LOCAL, DeploymentConfig(replica_count=2), DeploymentConfig(devices=(0,))]
)
@pytest.mark.parametrize("world", [1, 2])
def test_s3_a_launcher_without_external_is_refused(config, world):
    with pytest.raises(
        ConfigurationError, match=r"a launcher started this process \(RANK=1, WORLD"
    ):
        choose_mode(config, world, Launcher(1, 2))


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({}, None),
        ({"RANK": "", "WORLD_SIZE": ""}, None),
        ({"LOCAL_RANK": "1"}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ALONE),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, Launcher(3, 4, 1)),
    ],
)
def test_a_launcher_is_read_from_its_variables(variables, launcher, monkeypatch):
    _set(monkeypatch, variables)
    assert settings.launcher() == launcher


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "RANK='0' is set without WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE='2' is set without RANK"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "RANK='0' is set without WORLD_SIZE"),
        ({"RANK": "a", "WORLD_SIZE": "2"}, "RANK='a' is not valid"),
        ({"RANK": "0", "WORLD_SIZE": "2.0"}, "WORLD_SIZE='2.0' is not valid"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1' is not valid"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 must be less than WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK=0 must be less than WORLD_SIZE=0"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "x"}, "LOCAL_RANK='x' is not valid"),
    ],
)
def test_s2_a_half_set_or_wrong_launcher_is_refused(variables, message, monkeypatch):
    _set(monkeypatch, variables)
    with pytest.raises(ValueError) as caught:
        settings.launcher()
    assert message in str(caught.value)


def _set(monkeypatch, variables):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
