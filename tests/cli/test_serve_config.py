"""The configuration file of `phalanx serve`: what it takes, and how it refuses."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from phalanx.engine_config import EntryArgs
from phalanx.errors import ConfigurationError
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
        ("plugin: p\nzzz: 1", "allowed: plugin, plugin_args, engine, server, log)"),
        ("plugin: p\n1: 1", "unknown key 1"),
        ("server: {}", "the key plugin is missing"),
        ("plugin: p\nserver: {port: '1'}", "server.port: expected `int`, got `str`"),
        ("plugin: p\nserver: {port: -1}", "port=-1 must be from 0"),
        ("plugin: p\nlog: {level: LOUD}", "level='LOUD' is not known; allowed: DEBUG, INFO"),
        ("plugin: p\nserver: 3", "server: expected `object`, got `int`"),
        ("plugin: p\nplugin_args: [1]", "plugin_args: expected `object`, got `array`"),
        ("- 1", "must hold a mapping"),
        ("", "the key plugin is missing"),
    ],
)
def test_a_bad_file_is_refused_by_key(text, message):
    assert message in refused(text)
    assert refused(text).startswith("a.yaml")


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
