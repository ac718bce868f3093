"""What each worker of a deployment is told: the plugin, its rank and where all ranks meet."""

from __future__ import annotations

import os
from dataclasses import replace

from phalanx import log
from phalanx.engine.deployment_plan import DeploymentPlan
from phalanx.engine.ranks import RankPlace
from phalanx.engine.registry import PluginClass, plugin_ref
from phalanx.engine.workers.engine_runtime import EngineWorkerConfig
from phalanx.engine.workers.pickled import Pickled
from phalanx.engine.workers.runtime import WorkerFactorySpec
from phalanx.engine_config import EngineConfig, EntryArgs
from phalanx.errors import ConfigurationError
from phalanx.schema.placement import WorkerPlacement

FACTORY = "phalanx.engine.workers.engine_runtime:engine_worker_factory"


class WorkerConfigs:
    """Of all workers of a plan. The ranks of replica R meet at `port` + R of `address`."""

    def __init__(
        self,
        plugin: PluginClass,
        plugin_args: EntryArgs,
        config: EngineConfig,
        plan: DeploymentPlan,
        address: str,
    ) -> None:
        """Raises `ConfigurationError` for a plugin that a worker could not import."""
        _check_importable(plugin)
        self._plugin = plugin_ref(plugin)
        self._plugin_args = Pickled.of(plugin_args, f"plugin_args of plugin {plugin.name!r}")
        self._config = config
        self._plan = plan
        self._address = address

    def factory(self, placement: WorkerPlacement, port: int) -> WorkerFactorySpec:
        """For one worker."""
        here = [worker for worker in self._plan.workers if worker.node_rank == placement.node_rank]
        config = EngineWorkerConfig(
            plugin=self._plugin,
            plugin_args=self._plugin_args,
            config=_placed(self._config, placement.device_index, len(here)),
            place=RankPlace(
                placement.replica_rank,
                self._plan.replica_world_size,
                self._plan.output_rank,
                master=(self._address, port + placement.replica_id),
            ),
            placement=placement,
            log=log.configured(),
        )
        return WorkerFactorySpec(FACTORY, config)


def _placed(config: EngineConfig, device_index: int, num_workers: int) -> EngineConfig:
    """The configuration of a worker on that device; workers that compute on a CPU share it."""
    device, runtime = config.device, config.runtime
    if device.target.startswith("cuda"):
        return config.replace(device=replace(device, target=f"cuda:{device_index}"))
    if runtime.num_threads is None:
        share = max(1, len(os.sched_getaffinity(0)) // num_workers)
        return config.replace(runtime=replace(runtime, num_threads=share))
    return config


def _check_importable(plugin: PluginClass) -> None:
    target = plugin_ref(plugin).target
    if "<locals>" in target:
        raise ConfigurationError(
            f"plugin class {target} is defined inside a function, where a worker process cannot "
            "import it from; define it at the top level of a module"
        )
