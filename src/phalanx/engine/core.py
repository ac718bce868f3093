"""A loaded plugin: one rank of a replica."""

from __future__ import annotations

import logging
from typing import Generic, TypeVar

from phalanx.clock import Clock
from phalanx.engine.registry import plugin_ref
from phalanx.engine_config import EngineConfig, EntryArgs
from phalanx.plugin import BatchingEntry, Entry
from phalanx.schema.limits import Limits

logger = logging.getLogger(__name__)
E = TypeVar("E", Entry, BatchingEntry)


class EngineCore(Generic[E]):
    """A plugin's instance. Built, and its entry called, inside its rank's `activated()` only."""

    def __init__(
        self, plugin: type[E], plugin_args: EntryArgs, config: EngineConfig, clock: Clock
    ) -> None:
        import torch

        started_s = clock.monotonic_s()
        if config.runtime.seed is not None:
            torch.manual_seed(config.runtime.seed)
        entry: E = plugin()
        entry.setup(plugin_args)
        self.entry: E = entry
        self.limits: Limits = entry.limits
        logger.info(
            "Engine ready plugin=%s class=%s device=%s dtype=%s threads=%d total=%.2fs",
            plugin.name,
            plugin_ref(plugin).target,
            config.device.target,
            config.device.params_dtype,
            torch.get_num_threads(),
            clock.monotonic_s() - started_s,
        )

    def close(self) -> None:
        """Close the plugin; called once."""
        self.entry.close()
