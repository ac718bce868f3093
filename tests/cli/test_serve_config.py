"""The configuration file of `phalanx serve`: what it takes, and how it refuses."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path

import pytest

from phalanx.engine_config import EntryArgs
from phalanx.errors import ConfigurationError
from phalanx.schema.deployment import DeploymentConfig, WorkerSupervisorConfig
from phalanx.schema.deployment_section import DeploymentSection, ProcessSection
from phalanx.schema.parallel import (
    DenseParallelConfig,
    MoeParallelConfig,
    OuterParallelConfig,
    ParallelConfig,
)
from phalanx.schema.plugin_args import build_plugin_args
from phalanx.schema.serve_config import EngineSection, parse_serve_config
from phalanx.schema.yaml_text import parse_yaml


@dataclass(frozen=True)
class Args(EntryArgs):
    directory: str | Path
    log: Path | None = None
    steps: int = 3
    gains: tuple[float, ...] = (1.0,)
    mode: str = "auto"
    derived: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps={self.steps} must be positive")


def refused(text: str, overrides: dict[str, object] | None = None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        parse_serve_config(text, "a.yaml", overrides)
    return str(caught.value)


def test_yaml_words_and_numbers_are_those_of_yaml_1_2():
    text = "a: off\nb: yes\nc: true\nd: 1e-5\ne: 2024-01-01\nf: 3\ng: null\nh: -1.5\ni: .5"
    assert parse_yaml(text, "x") == {
        "a": "off",
        "b": "yes",
        "c": True,
        "d": 1e-5,
        "e": "2024-01-01",
        "f": 3,
        "g": None,
        "h": -1.5,
        "i": 0.5,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "a.yaml:3:1: key 'a' is given twice"),
        ("a: [1", "a.yaml:"),
        ("a: !!python/object:os.system {}", "could not determine a constructor"),
    ],
)
def test_bad_yaml_names_the_place(text, message):
    with pytest.raises(ConfigurationError) as caught:
        parse_yaml(text, "a.yaml")
    assert message in str(caught.value)


def test_overrides_win_over_the_file_and_the_file_over_defaults():
    config = parse_serve_config(
        "plugin: p\nplugin_args: {steps: 2, mode: off}\nserver: {port: 1, host: h}",
        "a.yaml",
        {"server.port": 2, "plugin_args.steps": 5, "engine.seed": 7},
    )
    assert config.plugin_args == {"steps": 5, "mode": "off"}
    assert (config.server.port, config.server.host, config.server.retry_after_s) == (2, "h", 1)
    assert config.engine == EngineSection(seed=7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plugn: p", "unknown key plugn; did you mean plugin?"),
        ("plugin: p\nserver: {prot: 1}", "unknown key server.prot; did you mean server.port?"),
        ("plugin: p\nengine: {dtyp: x}", "unknown key engine.dtyp; did you mean engine.dtype?"),
        ("plugin: p\nzzz: 1", "plugin_args, engine, deployment, parallel, server, adapter, log)"),
        ("plugin: p\n1: 1", "unknown key 1"),
        (
            "plugin: p\ndeployment: {replicas: 2}",
            "unknown key deployment.replicas; did you mean deployment.replica_count?",
        ),
        (
            "plugin: p\ndeployment: {process_config: {port: 2}}",
            "deployment.process_config.port; did you mean deployment.process_config.base_port?",
        ),
        ("plugin: p\nparallel: {tp: 2}", "unknown key parallel.tp; did you mean parallel."),
        (
            "plugin: p\nparallel: {dense: {tpsize: 2}}",
            "unknown key parallel.dense.tpsize; did you mean parallel.dense.tp_size?",
        ),
        (
            "plugin: p\nparallel: {dense: {tp_size: 0}}",
            "dense.tp_size=0 must be a positive integer",
        ),
        (
            "plugin: p\nparallel: {dense: {tp_size: x}}",
            "parallel.dense.tp_size: expected `int | nu",
        ),
        ("plugin: p\nparallel: {outer: 2}", "parallel.outer: expected `object`, got `int`"),
        (
            "plugin: p\ndeployment: {mode: remote}",
            "deployment: mode='remote' is not known; allowed",
        ),
        (
            "plugin: p\ndeployment: {devices: [0, 0]}",
            "deployment: devices=(0, 0) names device 0 more",
        ),
        ("plugin: p\ndeployment: {devices: [GPU-1]}", "set CUDA_VISIBLE_DEVICES"),
        (
            "plugin: p\ndeployment: {mode: external, replica_count: 2}",
            "deployment: replica_count=2",
        ),
        (
            "plugin: p\ndeployment: {process_config: {base_port: 0}}",
            "deployment: base_port=0 must be an integer, from 1 to 65535",
        ),
        (
            "plugin: p\ndeployment: {process_config: {extra_env: {RANK: '0'}}}",
            "deployment: extra_env cannot set RANK",
        ),
        ("server: {}", "the key plugin is missing"),
        (
            "plugin: p\nserver: {port: '1'}",
            "server.port: expected `int | null`, got `str` (it is '1')",
        ),
        ("plugin: p\nserver: {port: -1}", "port=-1 must be from 0"),
        ("plugin: p\nlog: {level: LOUD}", "level='LOUD' is not known; allowed: DEBUG, INFO"),
        ("plugin: p\nserver: 3", "server: expected `object`, got `int`"),
        ("plugin: p\nplugin_args: [1]", "plugin_args: expected `object`, got `array`"),
        ("- 1", "must hold a mapping"),
        ("roles: {}", "a.yaml is the file of a job, not of a server; `phalanx up` starts it"),
        ("", "the key plugin is missing"),
    ],
)
def test_a_bad_file_is_refused_by_key(text, message):
    assert message in refused(text)
    assert refused(text).startswith("a.yaml")


def test_a_deployment_and_a_topology_in_a_file():
    config = parse_serve_config(
        """
        plugin: p
        deployment:
          replica_count: 2
          devices: [3, "2", 1, 0]
          output_rank: 1
          auto_start: false
          process_config: {execution_timeout_s: 5, extra_env: {OMP_NUM_THREADS: "1"}}
        parallel:
          outer: {cfg_size: 2}
          dense: {tp_size: 2, sequence_parallel: true}
          moe: {ep_size: 2}
        """,
        "a.yaml",
    )
    assert config.deployment.deployment_config() == DeploymentConfig(
        replica_count=2,
        devices=(3, 2, 1, 0),
        output_rank=1,
        auto_start=False,
        process_config=WorkerSupervisorConfig(
            execution_timeout_s=5, extra_env=(("OMP_NUM_THREADS", "1"),)
        ),
    )
    parallel = ParallelConfig(
        outer=OuterParallelConfig(cfg_size=2),
        dense=DenseParallelConfig(tp_size=2, sequence_parallel=True),
        moe=MoeParallelConfig(ep_size=2),
    )
    assert config.parallel == parallel
    assert config.engine.engine_config(config.parallel).parallel == parallel


def test_without_the_blocks_there_is_one_rank_of_one_replica():
    config = parse_serve_config("plugin: p", "a.yaml")
    assert config.deployment.deployment_config() == DeploymentConfig()
    assert config.parallel == ParallelConfig()


@pytest.mark.parametrize(
    ("section", "config", "extra"),
    [
        (DeploymentSection, DeploymentConfig, set()),
        (ProcessSection, WorkerSupervisorConfig, {"node_rank"}),
    ],
)
def test_a_files_blocks_have_the_keys_of_the_values(section, config, extra):
    """`node_rank` is for deployments over several machines, which a file cannot describe."""
    assert {*section.__struct_fields__} | extra == {field.name for field in fields(config)}


def test_an_override_into_a_scalar_is_refused():
    assert "server must hold keys" in refused("plugin: p\nserver: 3", {"server.port": 1})


def test_engine_section_over_environment_over_defaults(monkeypatch):
    monkeypatch.setenv("PHALANX_PARAMS_DTYPE", "float16")
    monkeypatch.setenv("PHALANX_NUM_THREADS", "3")
    config = EngineSection(device="cpu", num_threads=2).engine_config()
    assert (config.device.target, config.device.params_dtype) == ("cpu", "float16")
    assert config.runtime.num_threads == 2
    monkeypatch.setenv("PHALANX_DEVICE", "cuda:3")
    assert EngineSection().engine_config().device.target == "cuda:3"
    assert EngineSection(device="cpu").engine_config().device.target == "cpu"
    monkeypatch.delenv("PHALANX_DEVICE")
    monkeypatch.delenv("PHALANX_PARAMS_DTYPE")
    assert EngineSection(device="cpu").engine_config().device.params_dtype == "float32"
    assert EngineSection(device="cuda:1").engine_config().device.params_dtype == "bfloat16"
    assert EngineSection(device="cpu", dtype="bfloat16").engine_config().device.params_dtype == (
        "bfloat16"
    )
    with pytest.raises(ConfigurationError, match="device target 'tpu'"):
        EngineSection(device="tpu").engine_config()


def test_plugin_args_are_converted_to_the_fields_types():
    values = {"directory": "d", "log": "l", "gains": [1, 2.5]}
    args = build_plugin_args(Args, values, "a.yaml")
    assert args == Args("d", log=Path("l"), gains=(1.0, 2.5))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "a.yaml: plugin_args.directory must be given"),
        ({"directory": "d", "stps": 1}, "unknown key plugin_args.stps; did you mean plugin_args.s"),
        ({"directory": "d", "derived": 1}, "unknown key plugin_args.derived"),
        ({"directory": "d", "steps": "2"}, "plugin_args.steps: expected `int`, got `str`"),
        ({"directory": "d", "gains": [1, "x"]}, "plugin_args.gains"),
        ({"directory": 3}, "plugin_args.directory: expected `str`, got `int` (it is 3)"),
        ({"directory": "d", "steps": 0}, "a.yaml: plugin_args: steps=0 must be positive"),
    ],
)
def test_bad_plugin_args_are_refused_by_key(values, message):
    with pytest.raises(ConfigurationError) as caught:
        build_plugin_args(Args, values, "a.yaml")
    assert message in str(caught.value)
