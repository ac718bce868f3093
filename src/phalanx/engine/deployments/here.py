"""The one replica whose rank is this process: alone (inline), or with a launcher's other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from phalanx.clock import Clock
from phalanx.engine.boundary import Raised, attempt, run_every
from phalanx.engine.executors import load_here
from phalanx.engine.executors.base import ReplicaExecutor
from phalanx.engine.executors.external import ExternalExecutor
from phalanx.engine.ranks import Rank, RankPlace
from phalanx.engine.registry import PluginClass
from phalanx.engine.requests import RequestTable
from phalanx.engine_config import EngineConfig, EntryArgs


class InlineDeployment:
    """Loads the plugin into this process; starts no other one and opens no port."""

    def __init__(
        self,
        plugin: PluginClass,
        plugin_args: EntryArgs,
        config: EngineConfig,
        requests: RequestTable,
        clock: Clock,
    ) -> None:
        self._config = config
        self._load = partial(load_here, plugin, plugin_args, requests=requests, clock=clock)

    def start(self) -> Sequence[ReplicaExecutor]:
        return (self.load(RankPlace()),)

    def load(self, place: RankPlace) -> ReplicaExecutor:
        """Join the other ranks, if any, and load the plugin."""
        rank = Rank(self._config, place)
        loaded = attempt(partial(self._load, rank=rank))
        if isinstance(loaded, Raised):
            run_every([rank.close])
            raise loaded.error
        return loaded

    def close(self) -> None:
        pass


class ExternalDeployment:
    """Loads this process's rank of a replica whose processes a launcher made."""

    def __init__(self, inline: InlineDeployment, place: RankPlace, requests: RequestTable) -> None:
        self._inline = inline
        self._place = place
        self._requests = requests

    def start(self) -> Sequence[ReplicaExecutor]:
        core = self._inline.load(self._place)
        return (ExternalExecutor(core, self._place, self._requests),)

    def close(self) -> None:
        pass
