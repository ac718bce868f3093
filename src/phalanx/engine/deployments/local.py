"""Replicas in worker processes on this machine, one process a rank, under one supervisor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from phalanx import log
from phalanx.clock import Clock
from phalanx.engine.deployment_plan import DeploymentPlan, visible_devices
from phalanx.engine.executors.base import ReplicaExecutor
from phalanx.engine.executors.multiprocess import MultiprocessExecutor
from phalanx.engine.ranks import RankPlace
from phalanx.engine.registry import PluginClass, plugin_ref
from phalanx.engine.requests import RequestTable
from phalanx.engine.workers.engine_runtime import EngineWorkerConfig
from phalanx.engine.workers.messages import Answer, Events, Finished
from phalanx.engine.workers.pickled import Pickled
from phalanx.engine.workers.runtime import WorkerFactorySpec
from phalanx.engine.workers.supervisor import WorkerSupervisor
from phalanx.engine_config import EngineConfig, EntryArgs
from phalanx.errors import ConfigurationError, EngineUnavailableError
from phalanx.schema.deployment import DeploymentConfig
from phalanx.schema.events import Event, Failed
from phalanx.schema.placement import WorkerPlacement

FACTORY = "phalanx.engine.workers.engine_runtime:engine_worker_factory"


class LocalDeployment:
    """All replicas of an engine; if one worker fails, all of them have."""

    def __init__(
        self,
        plugin: PluginClass,
        plugin_args: EntryArgs,
        config: EngineConfig,
        deployment: DeploymentConfig,
        requests: RequestTable,
        clock: Clock,
    ) -> None:
        _check_importable(plugin)
        self._plugin = plugin
        self._plugin_args = Pickled.of(plugin_args, f"plugin_args of plugin {plugin.name!r}")
        self._config = config
        self._supervision = deployment.supervision
        self._requests = requests
        visible = visible_devices(config.device.target)
        self._plan = DeploymentPlan.for_machine(deployment, config.parallel, visible)
        self._executors: tuple[MultiprocessExecutor, ...] = ()
        self._supervisor = WorkerSupervisor(
            self._plan,
            self._factory,
            self._supervision,
            self,
            target=config.device.target,
            clock=clock,
        )

    def start(self) -> Sequence[ReplicaExecutor]:
        ready = self._supervisor.start()
        world = self._plan.replica_world_size
        self._executors = tuple(
            MultiprocessExecutor(
                replica_id,
                world,
                self._plugin,
                ready[self._plan.output_worker(replica_id).worker_id],
                self._requests,
                self._supervisor,
            )
            for replica_id in range(self._plan.replica_count)
        )
        return self._executors

    def close(self) -> None:
        # First whoever waits: workers may take their time to stop.
        self._end_all(EngineUnavailableError("the engine is closed"))
        self._supervisor.close()
        self._end_all(EngineUnavailableError("the engine is closed"))

    def received(
        self,
        placement: WorkerPlacement,
        reply: Events | Finished | Answer,
        events: list[tuple[int, Event]],
    ) -> None:
        """A worker said something; on the supervisor's thread."""
        self._executors[placement.replica_id].received(placement, reply, events)

    def failed(self, error: EngineUnavailableError) -> None:
        """The workers have failed, all of them."""
        self._end_all(error)

    def _end_all(self, error: EngineUnavailableError) -> None:
        self._requests.refuse(error)
        for live in self._requests.live_requests():
            self._requests.end(live, Failed(live.rid, self._requests.unavailable()))
        for executor in self._executors:
            executor.failed()

    def _factory(self, placement: WorkerPlacement) -> WorkerFactorySpec:
        return WorkerFactorySpec(FACTORY, self._worker_config(placement))

    def _worker_config(self, placement: WorkerPlacement) -> EngineWorkerConfig:
        return EngineWorkerConfig(
            plugin=plugin_ref(self._plugin),
            plugin_args=self._plugin_args,
            config=_placed(self._config, placement.device_index, len(self._plan.workers)),
            place=RankPlace(
                placement.replica_rank,
                self._plan.replica_world_size,
                self._plan.output_rank,
                master=(
                    self._supervision.master_addr,
                    self._supervision.base_port + placement.replica_id,
                ),
            ),
            placement=placement,
            log=log.configured(),
        )


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
