from __future__ import annotations

import pytest

from phalanx import Engine, EngineArgs, Entry, EntryArgs
from phalanx.engine import registry
from phalanx.errors import ConfigurationError
from phalanx.plugin import PluginRef
from phalanx.testing import Counting, CountingArgs, Echo


def plugin(**attributes):
    base = {"name": "odd", "args_cls": EntryArgs, "request_cls": str, "output_cls": str}
    methods = {"setup": lambda self, args: None, "step": lambda self, request: request}
    fields = {key: value for key, value in {**base, **attributes}.items() if value is not None}
    return type("Odd", (Entry,), {"__module__": __name__, **fields, **methods})


def test_registered_plugins_are_found_by_name():
    assert registry.plugin_class("counting") is Counting
    names = Engine.registered()
    assert names.index("counting") < names.index("echo")
    assert Engine.register(Counting) is Counting
    assert Engine.registered() == names


def test_an_entry_point_is_found_without_registration():
    registry_names = Engine.registered()
    loaded = registry.plugin_class("causal_lm")
    assert loaded.name == "causal_lm"
    assert Engine.registered() == registry_names


def test_an_unknown_name_lists_the_known_and_the_nearest():
    with pytest.raises(ConfigurationError) as caught:
        Engine(EngineArgs("countin", CountingArgs()))
    message = str(caught.value)
    assert message.startswith("plugin 'countin' is not known; known are ")
    assert {"causal_lm,", "counting,", "echo,"} <= set(message.split())
    assert message.endswith("did you mean 'counting'?")
    with pytest.raises(ConfigurationError, match="plugin 3 must be a plugin's name"):
        Engine(EngineArgs(3, CountingArgs()))


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("halfway:Odd", "ModuleNotFoundError: No module named 'not_there'"),
        ("whole:Od", "AttributeError: module 'whole' has no attribute 'Od'"),
    ],
)
def test_an_entry_point_that_cannot_be_imported_is_named(tmp_path, monkeypatch, target, why):
    facts = tmp_path / "odd-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[phalanx.models]\nodd-one = {target}\n")
    (tmp_path / "halfway.py").write_text("import not_there\n")
    (tmp_path / "whole.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError) as caught:
        registry.plugin_class("odd-one")
    assert str(caught.value).startswith("entry point 'odd-one' of group phalanx.models leads to")
    assert why in str(caught.value)


def test_a_plugin_of_a_package_that_is_not_installed_says_so():
    with pytest.raises(ConfigurationError, match="install the package that has it"):
        registry.plugin_class("zzz")


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (int, "not a plugin; it must be a subclass"),
        ("counting", "not a plugin; it must be a subclass"),
        (plugin(name=""), "has name ''"),
        (plugin(name=None), "must declare `name`"),
        (plugin(args_cls=int), "has args_cls <class 'int'>"),
        (plugin(args_cls=None), "must declare `args_cls`"),
        (plugin(request_cls=None), "must declare `request_cls`"),
        (plugin(parallel_domains=frozenset({"dense", "depth"})), "parallel domains depth"),
        (plugin(name="echo"), "'echo' of tests.engine.test_registry:Odd is already taken by"),
    ],
)
def test_what_cannot_be_a_plugin_is_refused(cls, message):
    names = Engine.registered()
    with pytest.raises(ConfigurationError, match=message):
        Engine.register(cls)
    assert Engine.registered() == names


def test_a_reference_names_where_to_import_the_class_from():
    assert registry.plugin_ref(Echo) == PluginRef("echo", "phalanx.testing.echo:Echo")
