"""One rank of a replica: a plugin's instance, loaded under its engine's configuration."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from phalanx.clock import Clock
from phalanx.engine.registry import plugin_ref
from phalanx.engine_config import EngineConfig, EntryArgs, use_engine_config
from phalanx.plugin import BatchingEntry, Entry
from phalanx.schema.limits import Limits

logger = logging.getLogger(__name__)
E = TypeVar("E", Entry, BatchingEntry)


@contextmanager
def activated(config: EngineConfig) -> Iterator[None]:
    """What holds around a plugin's calls in the calling thread.

    `config` is current, its device is this thread's, gradients are off, and torch computes with
    `num_threads` threads (torch keeps that number for each calling thread).
    """
    import torch

    from phalanx.device import create_backend

    wanted = config.runtime.num_threads
    before = torch.get_num_threads()
    create_backend(config.device.target)
    if wanted is not None and wanted != before:
        torch.set_num_threads(wanted)
    try:
        with use_engine_config(config), torch.no_grad():
            yield
    finally:
        if wanted is not None and wanted != before:
            torch.set_num_threads(before)


class EngineCore(Generic[E]):
    """A loaded plugin. Built, and its entry called, inside `activated(config)` only."""

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
