"""Where a command's engine runs: the checked deployment, and the ports that it needs."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from phalanx import settings
from phalanx.engine.deployment_plan import DeploymentPlan, visible_devices
from phalanx.engine.workers.node_key import node_key
from phalanx.engine_config import EngineConfig
from phalanx.errors import ConfigurationError
from phalanx.schema.deployment import MAX_PORT, DeploymentConfig
from phalanx.schema.deployment_section import DeploymentSection
from phalanx.schema.launch import Mode, choose_mode
from phalanx.schema.placement import WorkerPlacement

ANY_PORTS = (0,) * 64


@dataclass(frozen=True)
class Placement:
    """A deployment, the mode that it comes to, and the plan of its workers if it has any.

    `needs_ports`: the ranks of its replicas meet at ports that nobody has named.
    """

    deployment: DeploymentConfig
    mode: Mode
    target: str
    plan: DeploymentPlan | None
    needs_ports: bool

    def with_ports(self) -> DeploymentConfig:
        """The deployment to run, at free ports where none were named."""
        if not self.needs_ports:
            return self.deployment
        process = self.deployment.supervision
        base_port = free_base_port(process.master_addr, self.deployment.replica_count)
        return dataclasses.replace(
            self.deployment, process_config=dataclasses.replace(process, base_port=base_port)
        )

    def lines(self) -> list[str]:
        """Which rank of which replica runs where, for people."""
        if self.plan is None:
            return [f"{self.mode}: replica 0 rank 0 in this process, on {self.target}"]
        return [f"{self.mode}: {self._rank(worker)}" for worker in self.plan.workers]

    def _rank(self, worker: WorkerPlacement) -> str:
        device = "cpu" if self.target == "cpu" else f"cuda:{worker.device_index}"
        answers = ", answers" if worker.is_output_rank else ""
        return f"replica {worker.replica_id} rank {worker.replica_rank} on {device}{answers}"


def place(section: DeploymentSection, config: EngineConfig) -> Placement:
    """Check a deployment against the topology, the launcher and the devices of this machine.

    Raises `ConfigurationError`, also for ranks of a launcher: a request that is typed or posted
    to one of them would not reach the others.
    """
    deployment = section.deployment_config()
    world = config.parallel.infer_replica_world_size()
    mode = choose_mode(deployment, world, settings.launcher())
    if mode is Mode.EXTERNAL and world > 1:
        raise ConfigurationError(
            f"deployment.mode='external' with {world} ranks a replica cannot be run by this "
            "command: each rank needs the same requests in the same order, and this one would "
            "get them alone; leave out mode, or call Engine.step() on every rank of your own "
            "program"
        )
    process = section.process_config
    if process.num_nodes > 1 and process.base_port is None:
        raise ConfigurationError(
            f"deployment.process_config.num_nodes={process.num_nodes} needs the place where the"
            " machines meet; give --dist-init-addr HOST:PORT of the first one"
        )
    if process.num_nodes > 1:
        node_key(deployment.supervision)
    plan = None
    if mode is Mode.LOCAL:
        visible = visible_devices(config.device.target)
        plan = DeploymentPlan.for_machine(deployment, config.parallel, visible)
    named = section.process_config.base_port is not None
    return Placement(
        deployment, mode, config.device.target, plan, plan is not None and world > 1 and not named
    )


def device_list(text: str) -> list[str]:
    """`0,1` as the entries of `DeploymentConfig.devices`, which checks them."""
    return [part.strip() for part in text.split(",") if part.strip()]


def meeting(address: str | None) -> dict[str, object]:
    """Where the machines of a replica meet, HOST:PORT, by the keys of a configuration."""
    if address is None:
        return {}
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isascii() and port.isdecimal()):
        raise ConfigurationError(f"--dist-init-addr {address!r} must be HOST:PORT")
    key = "deployment.process_config"
    return {f"{key}.master_addr": host.strip("[]"), f"{key}.base_port": int(port)}


def free_base_port(address: str, count: int, tries: Sequence[int] = ANY_PORTS) -> int:
    """The first of `count` neighbouring ports that are free at `address`.

    `tries` are the ports to look at for a first one; 0 is whichever the system gives.
    """
    for port in tries:
        with ExitStack() as taken:
            first = _bound_port(taken, address, port)
            rest = range(first + 1, first + count)
            if first + count - 1 <= MAX_PORT and all(_is_free(taken, address, p) for p in rest):
                return first
    raise ConfigurationError(
        f"found no {count} neighbouring free ports at {address}, one a replica; give "
        "deployment.process_config.base_port"
    )


def _bound_port(taken: ExitStack, address: str, port: int) -> int:
    try:
        family, kind, *_, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        listener = taken.enter_context(socket.socket(family, kind))
        listener.bind(where)
    except OSError as error:
        raise ConfigurationError(
            f"cannot take a port at deployment.process_config.master_addr={address!r}: "
            f"{error.strerror or error}; give an address of this machine"
        ) from error
    bound: int = listener.getsockname()[1]
    return bound


def _is_free(taken: ExitStack, address: str, port: int) -> bool:
    try:
        _bound_port(taken, address, port)
    except ConfigurationError:
        return False
    return True
