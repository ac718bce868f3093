"""A replica whose ranks are on several machines: the head's answers requests, and has the others
compute the same.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from queue import SimpleQueue

from phalanx import __version__
from phalanx.clock import Clock, SystemClock
from phalanx.engine.boundary import run_every
from phalanx.engine.checks import checked_deployment, checked_plugin
from phalanx.engine.deployment_plan import DeploymentPlan, visible_devices
from phalanx.engine.deployments.worker_configs import WorkerConfigs
from phalanx.engine.registry import PluginClass
from phalanx.engine.workers.messages import Answer, Apply, Events, Finished
from phalanx.engine.workers.node_key import node_key
from phalanx.engine.workers.node_links import (
    Applied,
    Ended,
    Greeting,
    Message,
    NodeLink,
    NodeListener,
    NodeRelay,
    Submitted,
)
from phalanx.engine.workers.payload import encode_request
from phalanx.engine.workers.places import place_in_file
from phalanx.engine.workers.supervisor import WorkerSupervisor
from phalanx.engine_config import EngineArgs, EngineConfig, EntryArgs
from phalanx.errors import ConfigurationError, EngineUnavailableError
from phalanx.plugin import BatchingEntry
from phalanx.schema.control import ReplaceWeights
from phalanx.schema.deployment import DeploymentConfig, WorkerSupervisorConfig
from phalanx.schema.events import Event
from phalanx.schema.placement import WorkerPlacement

logger = logging.getLogger(__name__)


class NodeHead:
    """The other machines, as the first one has them. `gather` comes before anything else."""

    def __init__(self, greeting: Greeting, config: WorkerSupervisorConfig, clock: Clock) -> None:
        """Raises `ConfigurationError` where the machines need a key, and this one has none."""
        self._greeting = greeting
        self._key = node_key(config)
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = False
        self._listener: NodeListener | None = None
        self._relay: NodeRelay | None = None

    def gather(self) -> int:
        """Wait for all of them; the port at which all ranks then meet.

        Raises `EngineUnavailableError` where they do not come in time.
        """
        config = self._config
        with self._lock:
            if self._closed:
                raise EngineUnavailableError("the engine is closed")
            self._listener = NodeListener(config.master_addr, config.base_port, self._key)
        port = _free_port(config.master_addr)
        try:
            links = self._listener.accept(
                self._greeting, config.num_nodes, port, config.startup_timeout_s, self._clock
            )
        finally:
            self._listener.close()
        self._relay = NodeRelay(links, config.shutdown_timeout_s)
        return port

    def watch(self, lost: Callable[[EngineUnavailableError], None]) -> None:
        """Tell `lost` of one that goes away, or has since they came."""
        assert self._relay is not None

        def tell(rank: int) -> None:
            lost(
                EngineUnavailableError(
                    f"machine {rank} of the {self._config.num_nodes} of this replica is gone; start"
                    " all of them again"
                )
            )

        self._relay.watch(tell)

    def send(self, message: Message) -> None:
        """To all of them; never waits."""
        assert self._relay is not None
        self._relay.send(message)

    def close(self) -> None:
        """Tell them that it is over, or stop waiting for them."""
        with self._lock:
            self._closed = True
            listener = self._listener
        if listener is not None:
            listener.close()
        if self._relay is not None:
            self._relay.close()


class NodeFollower:
    """The ranks of a replica on a machine that is not its head's: no requests come here but from the
    head, and nothing is answered.
    """

    def __init__(
        self, args: EngineArgs, deployment: DeploymentConfig, clock: Clock | None = None
    ) -> None:
        """Checks everything, starts nothing. Raises as `Engine` does."""
        plugin = checked_plugin(args)
        config = args.config if args.config is not None else EngineConfig.from_env()
        self._process = checked_deployment(deployment).supervision
        check_spanning(plugin)
        plugin.validate_parallel(config.parallel)
        plugin.validate_args(args.plugin_args, config.parallel)
        visible = visible_devices(config.device.target)
        plan = DeploymentPlan.for_machine(deployment, config.parallel, visible)
        configs = WorkerConfigs(plugin, args.plugin_args, config, plan, self._process.master_addr)
        clock = SystemClock() if clock is None else clock
        self._port = 0
        self._stopped = False
        self._link = NodeLink(
            (self._process.master_addr, self._process.base_port),
            node_key(self._process),
            greeting(plugin, args.plugin_args, config, self._process),
            self._process.startup_timeout_s,
            clock,
        )
        # As many as the head has accepted and not ended.
        self._messages: SimpleQueue[Message | EngineUnavailableError] = SimpleQueue()
        self._supervisor = WorkerSupervisor(
            plan,
            lambda placement: configs.factory(placement, self._port),
            self._process,
            self,
            target=config.device.target,
            clock=clock,
        )
        self._num_readers = sum(
            worker.node_rank == self._process.node_rank for worker in plan.workers
        )

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of its ranks."""
        return self._supervisor.pids

    def run(self, on_ready: Callable[[], None]) -> None:
        """Follow the head until it closes, or `stop`. Raises `EngineUnavailableError` where it goes
        away before, or a rank fails.
        """
        reader = threading.Thread(target=self._read, name="phalanx-node-head", daemon=True)
        try:
            self._port = self._link.meet()
            self._supervisor.start(reader.start)
            on_ready()
            while not isinstance(message := self._messages.get(), Ended):
                self._take(message)
        except EngineUnavailableError:
            if not self._stopped:
                raise
        finally:
            self._link.interrupt()
            if reader.ident is not None:
                reader.join()
            run_every([self._supervisor.close, self._link.close])

    def stop(self) -> None:
        """From any thread, and from a signal's handler."""
        self._stopped = True
        self._link.interrupt()

    def received(
        self,
        placement: WorkerPlacement,
        reply: Events | Finished | Answer,
        events: list[tuple[int, Event]],
    ) -> None:
        """Ranks that do not answer say nothing of requests."""

    def failed(self, error: EngineUnavailableError) -> None:
        """A rank of this machine has failed."""
        self._link.interrupt()

    def _read(self) -> None:
        """What the head says, also while the ranks start, which wait for those of a head."""
        while (message := self._link.receive()) is not None:
            self._messages.put(message)
            if isinstance(message, Ended):
                return
        gone = EngineUnavailableError("the head of this replica is gone")
        self._supervisor.fail(gone)
        self._messages.put(gone)

    def _take(self, message: Submitted | Applied | EngineUnavailableError) -> None:
        if isinstance(message, EngineUnavailableError):
            raise self._supervisor.failure or message
        if isinstance(message, Submitted):
            self._supervisor.submit(0, message.number, message.rid, message.request)
            self._supervisor.completed(message.number)  # the head has its time counted
            return
        op = message.op
        if not isinstance(op, ReplaceWeights):
            self._supervisor.send(0, Apply(message.number, op))
            return
        ref, files = place_in_file(encode_request(dict(op.tensors), self._num_readers))
        bare = ReplaceWeights({}, op.version)
        self._supervisor.send(0, Apply(message.number, bare, ref), files)


def greeting(
    plugin: PluginClass,
    plugin_args: EntryArgs,
    config: EngineConfig,
    process: WorkerSupervisorConfig,
) -> Greeting:
    """What machines of one replica have to agree on: every number. Of a text, such as a path or an
    address, each may have its own.
    """
    replica = f"{plugin.name} of {process.num_nodes} machines, {config.parallel}"
    assert is_dataclass(plugin_args)
    numbers = {"seed": config.runtime.seed, **asdict(plugin_args)}
    settings = {
        name: repr(value) if value is None or isinstance(value, int | float) else "(text)"
        for name, value in numbers.items()
    }
    settings["params_dtype"] = str(config.device.params_dtype)
    return Greeting(process.node_rank, __version__, replica, settings)


def check_spanning(plugin: PluginClass) -> None:
    """Raises `ConfigurationError` for a plugin whose ranks do not keep in step by themselves."""
    if not issubclass(plugin, BatchingEntry):
        raise ConfigurationError(
            f"plugin {plugin.name!r} answers one request at a time, and only a batching one can span"
            " machines; leave --nnodes out"
        )


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as taken:
        port: int = taken.getsockname()[1]
        return port
