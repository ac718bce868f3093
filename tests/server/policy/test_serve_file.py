"""`phalanx serve` of a robot policy by its file: what it takes, and how it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from phalanx import Engine
from phalanx.cli.building import build_engine
from phalanx.cli.main import main
from phalanx.engine_config import EntryArgs
from phalanx.errors import ConfigurationError
from phalanx.plugin import PolicyAdapter
from phalanx.schema.plugin_args import build_plugin_args
from phalanx.schema.serve_config import parse_serve_config
from phalanx.schema.yaml_text import parse_yaml
from phalanx.server.backends.pi05 import PI05Backend
from phalanx.testing.echo import Echo
from phalanx.testing.policy import FakePolicyAdapter, FakePolicyArgs

DOCUMENT = """
plugin: fake_policy
plugin_args:
  max_batch_size: 1
config:
  device: {target: cpu, params_dtype: bfloat16}
deployment:
  mode: auto
server:
  model_name: pi05
  port: 50064
adapter:
  factory: tests.server.policy.test_serve_file:Backend
  args: {image_names: [main_images, wrist_images]}
"""


def Backend(plugin_args: FakePolicyArgs, *, image_names: list[str]) -> PolicyAdapter:
    return FakePolicyAdapter(plugin_args, tuple(image_names))


@pytest.fixture(scope="module", autouse=True)
def echo_plugin() -> None:
    Engine.register(Echo)


@pytest.fixture
def check(capsys, monkeypatch, tmp_path):
    """Checks a file; gives the exit code and what was printed."""
    monkeypatch.setenv("PHALANX_DEVICE", "cpu")

    def run(text: str, *flags: str) -> tuple[int, str]:
        file = tmp_path / "pi05.yaml"
        file.write_text(text)
        with pytest.raises(SystemExit) as ended:
            main(["serve", str(file), "--check", *flags])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out or err

    return run


def test_r98_the_documents_file_is_taken_as_it_is(check):
    code, out = check(DOCUMENT)
    assert code == 0, out
    printed = parse_yaml(out, "out")
    assert printed["server"]["model_name"] == "pi05"
    assert printed["server"]["port"] == 50064
    assert printed["engine"]["device"] == "cpu"
    assert printed["engine"]["dtype"] == "bfloat16"
    assert printed["adapter"]["args"] == {"image_names": ["main_images", "wrist_images"]}
    assert check(out) == (0, out)


def test_keys_are_not_shown(check):
    keys = "{api_key: secret-1, gateway: 'h:1', gateway_key: secret-2}"
    code, out = check(f"plugin: fake_policy\nserver: {keys}")
    assert code == 0, out
    assert "secret" not in out
    assert out.count("_key: (set)") == 2


def test_r98_two_servers_of_a_machine_differ_by_their_ports(check):
    ports = [
        parse_yaml(check(DOCUMENT, "--port", port)[1], "out")["server"]["port"]
        for port in ("50063", "50064")
    ]
    assert ports == [50063, 50064]


@pytest.mark.parametrize(("plugin", "port"), [("fake_policy", 50063), ("echo", 30000)])
def test_the_port_is_that_of_the_kind_of_model(check, plugin, port):
    code, out = check(f"plugin: {plugin}")
    assert code == 0, out
    assert parse_yaml(out, "out")["server"]["port"] == port


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plugin: fake_policy\nadapter: {args: {tokens: 3}}", "adapter: unknown key tokens"),
        ("plugin: fake_policy\nadapter: {factory: here}", "must be module:callable"),
        ("plugin: fake_policy\nadapter: {factory: 'no.such:Thing'}", "cannot be imported"),
        (
            "plugin: fake_policy\nadapter: {factory: 'phalanx.schema.parallel:MODEL_DOMAINS'}",
            "is not callable",
        ),
        (
            "plugin: fake_policy\n"
            "adapter: {factory: 'tests.server.policy.test_serve_file:Backend', args: {x: 1}}",
            "unexpected keyword argument 'x'",
        ),
        (
            "plugin: fake_policy\nadapter: {factory: 'phalanx.server.backends.pi05:PI05Backend'}",
            "takes PI05Args, not FakePolicyArgs",
        ),
        ("plugin: echo\nserver: {http_port: 1}", "server.http_port is for robot policies"),
        ("plugin: echo\nserver: {gateway: 'h:1'}", "server.gateway is for robot policies"),
        ("plugin: echo\nadapter: {args: {a: 1}}", "adapter is for robot policies"),
        ("plugin: fake_policy\nserver: {gateway: here}", "server.gateway: endpoint 'here' has no"),
        ("plugin: fake_policy\nserver: {gateway: 'http://h:1'}", "must be HOST:PORT, without http"),
        (
            "plugin: fake_policy\nserver: {gateway: 'h:1', host: 0.0.0.0}",
            "give advertise=HOST:PORT",
        ),
        ("plugin: fake_policy\nserver: {gateway: 'h:1', host: '::'}", "give advertise=HOST:PORT"),
        (
            "plugin: fake_policy\nserver: {gateway: 'h:1', advertise: '0.0.0.0:1'}",
            "stands for every address",
        ),
        ("plugin: fake_policy\nserver: {advertise: 'h:1'}", "give gateway too, or leave it out"),
        ("plugin: fake_policy\nserver: {port: 5, http_port: 5}", "are the same port"),
        ("plugin: fake_policy\nserver: {role: decode}", "needs a plugin that serves text"),
        (
            "plugin: fake_policy\nserver: {model_name: a, served_model_name: b}",
            "mean the same; give one of them",
        ),
        ("plugin: fake_policy\nserver: {workers: 0}", "workers=0 must be at least 1"),
        ("plugin: fake_policy\nconfig: {divice: {}}", "config.divice; did you mean config.device?"),
        (
            "plugin: fake_policy\nconfig: {device: {dtype: bfloat16}}",
            "unknown key config.device.dtype; did you mean config.device.params_dtype?",
        ),
        (
            "plugin: fake_policy\nconfig: {device: {target: cpu}}\nengine: {device: cpu}",
            "config.device.target and engine.device mean the same; give one of them",
        ),
        ("plugin: fake_policy\nconfig: 3", "config must hold keys of its own"),
        ("plugin: fake_policy\nplugin_args: {checkpoint_dir: ./none}", "none' does not exist"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(check, text, message):
    code, out = check(text)
    assert code == 2, out
    assert message in out
    assert out.count("\n") == 1


def test_paths_in_a_file_start_at_its_folder(tmp_path):
    text = (
        "plugin: p\n"
        "plugin_args: {checkpoint_dir: ./model, name: pi05, shapes: [[360, 360, 3]]}\n"
        "adapter: {args: {tokenizer_dir: ../tokens, files: [./a], image_names: [front]}}\n"
    )
    config = parse_serve_config(text, "a.yaml", {"plugin_args.other": "./x"}, tmp_path / "etc")
    assert config.plugin_args == {
        "checkpoint_dir": str(tmp_path / "etc" / "model"),
        "name": "pi05",
        "shapes": [[360, 360, 3]],
        "other": "./x",
    }
    assert config.adapter.args == {
        "tokenizer_dir": str(tmp_path / "tokens"),
        "files": [str(tmp_path / "etc" / "a")],
        "image_names": ["front"],
    }
    home = parse_serve_config("plugin: p\nplugin_args: {a: ~/m}", "a.yaml", None, tmp_path)
    assert home.plugin_args == {"a": str(Path.home() / "m")}


def test_config_says_what_engine_and_parallel_say():
    config = parse_serve_config(
        "plugin: p\n"
        "config:\n"
        "  device: {target: 'cuda:1', params_dtype: bfloat16}\n"
        "  runtime: {num_threads: 2}\n"
        "  parallel: {dense: {tp_size: 2}}\n",
        "a.yaml",
        {"engine.seed": 7},
    )
    assert (config.engine.device, config.engine.dtype) == ("cuda:1", "bfloat16")
    assert (config.engine.num_threads, config.engine.seed) == (2, 7)
    assert config.parallel.dense.tp_size == 2


@dataclass(frozen=True)
class Sizes:
    heads: int = 1


@dataclass(frozen=True)
class ManyArgs(EntryArgs):
    sizes: Sizes | None = None
    rename: Callable[[str], str] | Mapping[str, str] | None = None
    hook: Callable[[], None] = print


def test_arguments_of_a_plugin_may_hold_others_and_functions_may_not_be_written():
    values = {"sizes": {"heads": 3}, "rename": {"a": "b"}}
    assert build_plugin_args(ManyArgs, values, "a.yaml") == ManyArgs(Sizes(3), {"a": "b"})
    for key, value, message in (
        ("sizes", {"head": 3}, "unknown key plugin_args.sizes.head; did you mean"),
        ("sizes", {"heads": "3"}, "plugin_args.sizes: heads: expected `int`, got `str`"),
        ("rename", 3, "plugin_args.rename: expected `object | null`, got `int`"),
        ("hook", "print", "plugin_args.hook: a function cannot be written in a file"),
    ):
        with pytest.raises(ConfigurationError, match=re.escape(message)):
            build_plugin_args(ManyArgs, {key: value}, "a.yaml")


def test_the_adapter_of_another_model_is_refused():
    with pytest.raises(ConfigurationError, match="takes PI05Args, not FakePolicyArgs"):
        PI05Backend(FakePolicyArgs())


def test_a_program_builds_the_engine_of_a_file(tmp_path):
    file = tmp_path / "fake.yaml"
    file.write_text(
        "plugin: fake_policy\nplugin_args: {max_batch_size: 3}\nengine: {device: cpu}\n"
    )
    with build_engine(file) as engine:
        assert engine.plugin.name == "fake_policy"
        assert engine.limits.max_batch_size == 3
    with pytest.raises(ConfigurationError, match="cannot read"):
        build_engine(tmp_path / "none.yaml")
