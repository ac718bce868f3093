"""Replicas in worker processes on this machine, one process a rank, under one supervisor; of a replica
that spans machines, the ranks on the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from phalanx.clock import Clock
from phalanx.engine.deployment_plan import DeploymentPlan, visible_devices
from phalanx.engine.deployments.spanning import NodeHead, check_spanning, greeting
from phalanx.engine.deployments.worker_configs import WorkerConfigs
from phalanx.engine.executors.base import ReplicaExecutor
from phalanx.engine.executors.multiprocess import MultiprocessExecutor
from phalanx.engine.registry import PluginClass
from phalanx.engine.requests import RequestTable
from phalanx.engine.workers.messages import Answer, Events, Finished
from phalanx.engine.workers.runtime import WorkerFactorySpec
from phalanx.engine.workers.supervisor import WorkerSupervisor
from phalanx.engine_config import EngineConfig, EntryArgs
from phalanx.errors import EngineUnavailableError
from phalanx.schema.deployment import DeploymentConfig
from phalanx.schema.events import Event, Failed
from phalanx.schema.placement import WorkerPlacement


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
        process = deployment.supervision
        self._plugin = plugin
        self._requests = requests
        visible = visible_devices(config.device.target)
        self._plan = DeploymentPlan.for_machine(deployment, config.parallel, visible)
        self._configs = WorkerConfigs(plugin, plugin_args, config, self._plan, process.master_addr)
        self._port = process.base_port
        self._head: NodeHead | None = None
        if process.num_nodes > 1:
            check_spanning(plugin)
            self._head = NodeHead(greeting(plugin, plugin_args, config, process), process, clock)
        self._executors: tuple[MultiprocessExecutor, ...] = ()
        self._supervisor = WorkerSupervisor(
            self._plan,
            self._factory,
            process,
            self,
            target=config.device.target,
            clock=clock,
        )

    def start(self) -> Sequence[ReplicaExecutor]:
        if self._head is None:
            ready = self._supervisor.start()
        else:
            self._supervisor.pass_on(self._head)
            self._port = self._head.gather()
            ready = self._supervisor.start(partial(self._head.watch, self._supervisor.fail))
        # Ranks of other machines are not heard here.
        world = len(ready) // self._plan.replica_count
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
        if self._head is not None:
            self._head.close()
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
        return self._configs.factory(placement, self._port)
