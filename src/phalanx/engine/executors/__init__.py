"""How one replica executes requests: the seam between the engine and where its core runs."""

from __future__ import annotations

from phalanx.clock import Clock
from phalanx.engine.executors.base import ReplicaExecutor
from phalanx.engine.executors.batching import BatchingExecutor
from phalanx.engine.executors.serial import SerialExecutor
from phalanx.engine.registry import PluginClass
from phalanx.engine.requests import RequestTable
from phalanx.engine_config import EngineConfig, EntryArgs
from phalanx.plugin import BatchingEntry

__all__ = ["ReplicaExecutor", "create_executor"]


def create_executor(
    plugin: PluginClass,
    plugin_args: EntryArgs,
    config: EngineConfig,
    requests: RequestTable,
    clock: Clock,
) -> ReplicaExecutor:
    """Load the plugin into a replica in this process."""
    if issubclass(plugin, BatchingEntry):
        return BatchingExecutor(plugin, plugin_args, config, requests, clock)
    return SerialExecutor(plugin, plugin_args, config, requests, clock)
