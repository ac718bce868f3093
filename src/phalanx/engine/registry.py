"""The plugin table: which class a plugin name stands for.

A name is a class registered with `@Engine.register`, or else an entry point of the
`phalanx.models` group of an installed package, imported on first use.
"""

from __future__ import annotations

import difflib
import inspect
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from phalanx.engine_config import EntryArgs
from phalanx.errors import ConfigurationError, MissingDependencyError
from phalanx.plugin import PARALLEL_DOMAINS, BatchingEntry, Entry, PluginRef

ENTRY_POINT_GROUP = "phalanx.models"
PluginClass = type[Entry] | type[BatchingEntry]
P = TypeVar("P", bound=PluginClass)

_registered: dict[str, PluginClass] = {}


def register(plugin: P) -> P:
    """Class decorator: make a plugin known by its `name`."""
    _check(plugin)
    known = _registered.setdefault(plugin.name, plugin)
    if known is not plugin:
        raise ConfigurationError(
            f"plugin name {plugin.name!r} of {plugin_ref(plugin).target} is already taken by "
            f"{plugin_ref(known).target}; choose another name"
        )
    return plugin


def registered() -> tuple[str, ...]:
    """Names of the registered plugins, in the order of their registration."""
    return tuple(_registered)


def plugin_class(name: str) -> PluginClass:
    """The class that `name` stands for."""
    if not isinstance(name, str):
        raise ConfigurationError(f"plugin {name!r} must be a plugin's name, a string")
    known = _registered.get(name)
    if known is not None:
        return known
    points = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name in points:
        return _load(points[name])
    names = sorted({*_registered, *points})
    nearest = difflib.get_close_matches(name, names, n=1)
    hint = (
        f"; did you mean {nearest[0]!r}?"
        if nearest
        else f"; install the package that has it as an entry point of the group {ENTRY_POINT_GROUP}"
    )
    raise ConfigurationError(
        f"plugin {name!r} is not known; known are {', '.join(names) or 'none'}{hint}"
    )


def plugin_ref(plugin: PluginClass) -> PluginRef:
    """Where to import a plugin's class from."""
    return PluginRef(name=plugin.name, target=f"{plugin.__module__}:{plugin.__qualname__}")


def _load(point: EntryPoint) -> PluginClass:
    try:
        plugin = point.load()
    except MissingDependencyError:
        raise
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"entry point {point.name!r} of group {ENTRY_POINT_GROUP} leads to {point.value}, which"
            f" cannot be imported ({type(error).__name__}: {error}); install what it needs, or"
            " correct the package that has it"
        ) from error
    _check(plugin)
    if plugin.name != point.name:
        raise ConfigurationError(
            f"entry point {point.name!r} of group {ENTRY_POINT_GROUP} leads to {point.value}, "
            f"whose plugin name is {plugin.name!r}; both must be equal"
        )
    checked: PluginClass = plugin
    return checked


def _check(plugin: PluginClass) -> None:
    if not inspect.isclass(plugin) or not issubclass(plugin, (Entry, BatchingEntry)):
        raise ConfigurationError(
            f"{plugin!r} is not a plugin; it must be a subclass of phalanx.Entry or "
            "phalanx.BatchingEntry"
        )
    where = f"plugin class {plugin.__module__}:{plugin.__qualname__}"
    for attribute in ("name", "args_cls", "request_cls", "output_cls"):
        if not hasattr(plugin, attribute):
            raise ConfigurationError(f"{where} must declare `{attribute}`")
    if not isinstance(plugin.name, str) or not plugin.name:
        raise ConfigurationError(f"{where} has name {plugin.name!r}; it must be a non-empty string")
    if not inspect.isclass(plugin.args_cls) or not issubclass(plugin.args_cls, EntryArgs):
        raise ConfigurationError(
            f"{where} has args_cls {plugin.args_cls!r}; it must be a subclass of phalanx.EntryArgs"
        )
    unknown = sorted(set(plugin.parallel_domains) - PARALLEL_DOMAINS)
    if unknown:
        raise ConfigurationError(
            f"{where} names the parallel domains {', '.join(unknown)}; "
            f"allowed are {', '.join(sorted(PARALLEL_DOMAINS))}"
        )
