"""The adapter that a plugin brings itself, asked for by the plugin's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.engine.registry import plugin_class
from phalanx.engine_config import EntryArgs
from phalanx.errors import ConfigurationError
from phalanx.plugin import PolicyAdapter


def plugin_adapter(name: str, plugin_args: EntryArgs, settings: Mapping[str, Any]) -> PolicyAdapter:
    """The adapter of the plugin `name`. Raises `ConfigurationError` where it has none, or where
    `plugin_args` are another plugin's."""
    plugin = plugin_class(name)
    if not isinstance(plugin_args, plugin.args_cls):
        raise ConfigurationError(
            f"the adapter of plugin {name!r} takes {plugin.args_cls.__name__}, not "
            f"{type(plugin_args).__name__}; let plugin and adapter.factory name the same model"
        )
    adapter = plugin.policy(plugin_args, settings)
    if adapter is None:
        raise ConfigurationError(f"plugin {name!r} is no robot policy: it has no adapter")
    return adapter
