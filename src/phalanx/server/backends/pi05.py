"""`adapter.factory: phalanx.server.backends.pi05:PI05Backend`, as servers' files name it."""

from __future__ import annotations

from typing import Any

from phalanx.engine_config import EntryArgs
from phalanx.plugin import PolicyAdapter
from phalanx.server.backends.of_plugin import plugin_adapter


def PI05Backend(plugin_args: EntryArgs, **settings: Any) -> PolicyAdapter:  # noqa: ANN401
    """The adapter of the plugin `pi05`; `settings` are those of `adapter.args`."""
    return plugin_adapter("pi05", plugin_args, settings)
