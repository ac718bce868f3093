"""Paths in a configuration file: what begins with `./`, `../` or `~` is one, and starts at the
file's own directory or at the user's. Everything else, names of checkpoints among it, stays.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_STARTS = ("./", "../", "~")


def resolve_paths(document: dict[str, Any], directory: Path) -> None:
    """Resolve the paths in `plugin_args` and in `adapter.args` of `document`, in place."""
    adapter = document.get("adapter")
    for owner, key in ((document, "plugin_args"), (adapter, "args")):
        if isinstance(owner, dict) and key in owner:
            owner[key] = resolved(owner[key], directory)


def resolved(value: Any, directory: Path) -> Any:  # noqa: ANN401 - whatever a file holds
    """`value` with the paths in it, at any depth, resolved."""
    match value:
        case str() if value in (".", "..") or value.startswith(_STARTS):
            return str((directory / Path(value).expanduser()).resolve())
        case dict():
            return {key: resolved(one, directory) for key, one in value.items()}
        case list():
            return [resolved(one, directory) for one in value]
    return value
