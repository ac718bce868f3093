"""The `config` block of a server's file: an engine's configuration by the names that it has in
Python. It is read into the blocks `engine` and `parallel`, which hold the same under shorter names.
"""

from __future__ import annotations

from typing import Any

from phalanx.errors import ConfigurationError
from phalanx.schema.file_keys import unknown_key

_PLACES = {
    "device": {"target": "device", "params_dtype": "dtype"},
    "runtime": {
        name: name
        for name in (
            "num_threads",
            "seed",
            "max_pending_requests",
            "stall_timeout_s",
            "dist_timeout_s",
            "step_timings",
            "use_cuda_graph",
        )
    },
}
"""Sections of `config`, and by key of each the key of `engine`."""


def merge_config(document: dict[str, Any], source: str) -> None:
    """Move what `document["config"]` holds to where it is read from.

    Raises `ConfigurationError` for keys that do not exist, and for what both blocks give.
    """
    if "config" not in document:
        return
    config = _mapping(document.pop("config"), source, "config")
    for name, value in config.items():
        if name == "parallel":
            _put(document, "parallel", value, source, "config.parallel", "parallel")
        elif name in _PLACES:
            _merge_section(document, name, value, source)
        else:
            raise unknown_key(str(name), (*_PLACES, "parallel"), source, "config.")


def _merge_section(document: dict[str, Any], name: str, value: object, source: str) -> None:
    path, places = f"config.{name}", _PLACES[name]
    if document.get("engine") is None:
        document["engine"] = {}
    engine = _mapping(document["engine"], source, "engine")
    for key, entry in _mapping(value, source, path).items():
        if key not in places:
            raise unknown_key(str(key), tuple(places), source, f"{path}.")
        place = places[key]
        _put(engine, place, entry, source, f"{path}.{key}", f"engine.{place}")


def _put(
    target: dict[str, Any], key: str, value: object, source: str, given: str, place: str
) -> None:
    if key in target:
        raise ConfigurationError(f"{source}: {given} and {place} mean the same; give one of them")
    target[key] = value


def _mapping(value: object, source: str, path: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigurationError(f"{source}: {path} must hold keys of its own")
    return value
