"""`adapter.factory: phalanx.server.backends.pi0:PI0Backend`, as servers' files name it."""

from __future__ import annotations

from typing import Any

from phalanx.engine_config import EntryArgs
from phalanx.plugin import PolicyAdapter
from phalanx.server.backends.of_plugin import plugin_adapter


def PI0Backend(plugin_args: EntryArgs, **settings: Any) -> PolicyAdapter:  # noqa: ANN401
    """The adapter of the plugin `pi0`; `settings` are those of `adapter.args`."""
    return plugin_adapter("pi0", plugin_args, settings)
