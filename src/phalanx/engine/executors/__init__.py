"""How one replica executes requests: the seam between the engine and where its ranks run."""

from __future__ import annotations

from phalanx.clock import Clock
from phalanx.engine.executors.base import ReplicaExecutor
from phalanx.engine.executors.batching import BatchingExecutor
from phalanx.engine.executors.serial import SerialExecutor
from phalanx.engine.ranks import Rank
from phalanx.engine.registry import PluginClass
from phalanx.engine.requests import RequestTable
from phalanx.engine_config import EntryArgs
from phalanx.plugin import BatchingEntry

__all__ = ["ReplicaExecutor", "load_here"]


def load_here(
    plugin: PluginClass, plugin_args: EntryArgs, rank: Rank, requests: RequestTable, clock: Clock
) -> ReplicaExecutor:
    """Load the plugin into this process, as rank `rank` of its replica."""
    if issubclass(plugin, BatchingEntry):
        return BatchingExecutor(plugin, plugin_args, rank, requests, clock)
    return SerialExecutor(plugin, plugin_args, rank, requests, clock)
