"""Which rank of which replica runs on which device: a pure function of values, torch-free.

Ranks take devices in order: the first as many as a replica has ranks hold replica 0, the next ones
replica 1, and so on. Devices beyond the last rank stay free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from phalanx import settings
from phalanx.errors import ConfigurationError
from phalanx.parallel.layout import build_layout, memberships
from phalanx.schema.deployment import DeploymentConfig, NodeResources, WorkerSupervisorConfig
from phalanx.schema.parallel import ParallelConfig
from phalanx.schema.placement import WorkerPlacement


@dataclass(frozen=True)
class DeploymentPlan:
    """All workers of a deployment, ordered by `worker_id`.

    `master_addrs` has, by replica, where its ranks meet if it spans machines, else None.
    """

    replica_count: int
    replica_world_size: int
    output_rank: int
    workers: tuple[WorkerPlacement, ...]
    master_addrs: tuple[str | None, ...]

    @classmethod
    def build(
        cls,
        parallel: ParallelConfig,
        replica_count: int,
        nodes: Sequence[NodeResources],
        *,
        output_rank: int = 0,
    ) -> Self:
        """Place `replica_count` replicas of this topology on the devices of `nodes`.

        Raises `ConfigurationError` for nodes that do not count up from 0, for too few devices, for
        an output rank outside of the replica, and for a replica over several nodes whose first has
        no address.
        """
        world = parallel.infer_replica_world_size()
        if replica_count < 1:
            raise ConfigurationError(f"replica_count={replica_count} must be at least 1")
        if not 0 <= output_rank < world:
            raise ConfigurationError(
                f"output_rank={output_rank} must be a rank of the replica, 0 to {world - 1}"
            )
        slots = _slots(nodes)
        needed = replica_count * world
        if len(slots) < needed:
            raise ConfigurationError(
                f"the deployment needs {needed} worker slots (replica_count={replica_count} x "
                f"{world} ranks a replica), but there are {len(slots)} devices; give more devices, "
                "or fewer replicas or ranks"
            )
        layout = build_layout(parallel.resolve(world))
        group_ranks = [dict(memberships(layout, rank)) for rank in range(world)]
        workers = []
        for worker_id, (node_rank, device_index) in enumerate(slots[:needed]):
            replica_id, replica_rank = divmod(worker_id, world)
            workers.append(
                WorkerPlacement(
                    worker_id=worker_id,
                    replica_id=replica_id,
                    replica_rank=replica_rank,
                    node_rank=node_rank,
                    device_index=device_index,
                    group_ranks=group_ranks[replica_rank],
                    is_output_rank=replica_rank == output_rank,
                )
            )
        addresses = {node.rank: node.address for node in nodes}
        master_addrs = tuple(
            _master_addr(workers[start : start + world], addresses)
            for start in range(0, needed, world)
        )
        return cls(replica_count, world, output_rank, tuple(workers), master_addrs)

    @classmethod
    def for_machine(
        cls, config: DeploymentConfig, parallel: ParallelConfig, visible_devices: int | None
    ) -> Self:
        """The plan of a local deployment; `visible_devices` None where ranks share the CPU.

        Without `config.devices` the visible ones are taken in order.
        """
        num_nodes = config.supervision.num_nodes
        needed = config.replica_count * parallel.infer_replica_world_size()
        if needed % num_nodes:
            raise ConfigurationError(
                f"a replica of {needed} ranks cannot be cut into num_nodes={num_nodes} equal parts; "
                "give a multiple"
            )
        needed //= num_nodes
        devices = config.devices
        if not devices:
            devices = tuple(range(needed if visible_devices is None else visible_devices))
        elif visible_devices is not None and max(devices) >= visible_devices:
            raise ConfigurationError(
                f"device {max(devices)} of devices={devices!r} does not exist: this process sees "
                f"{visible_devices}, numbered from 0 whatever CUDA_VISIBLE_DEVICES or "
                "PHALANX_SIMULATED_DEVICES names"
            )
        return cls.build(
            parallel,
            config.replica_count,
            _like_this(devices, needed, config.supervision),
            output_rank=config.output_rank,
        )

    def replica(self, replica_id: int) -> tuple[WorkerPlacement, ...]:
        """The workers of one replica, by rank."""
        first = replica_id * self.replica_world_size
        return self.workers[first : first + self.replica_world_size]

    def output_worker(self, replica_id: int) -> WorkerPlacement:
        """The worker that answers for a replica."""
        return self.replica(replica_id)[self.output_rank]


def _like_this(
    devices: tuple[int, ...], needed: int, process: WorkerSupervisorConfig
) -> tuple[NodeResources, ...]:
    """This machine, and as many more of a replica as there are, whose devices are numbered alike."""
    if process.num_nodes == 1:
        return (NodeResources(0, devices),)
    return tuple(
        NodeResources(rank, devices[:needed], process.master_addr)
        for rank in range(process.num_nodes)
    )


def visible_devices(target: str) -> int | None:
    """How many devices of the target's kind this process sees; None where ranks share the CPU, and
    no devices are simulated.
    """
    if not target.startswith("cuda"):
        simulated = settings.simulated_devices()
        return None if simulated is None else len(simulated.devices)
    from phalanx.device import num_devices

    return num_devices(target)


def _slots(nodes: Sequence[NodeResources]) -> list[tuple[int, int]]:
    ranks = [node.rank for node in nodes]
    if ranks != list(range(len(nodes))):
        raise ConfigurationError(f"nodes have the ranks {ranks}; they must count up from 0")
    return [(node.rank, device) for node in nodes for device in node.devices]


def _master_addr(
    workers: Sequence[WorkerPlacement], addresses: dict[int, str | None]
) -> str | None:
    root = workers[0]
    if all(worker.node_rank == root.node_rank for worker in workers):
        return None
    address = addresses[root.node_rank]
    if address is None:
        raise ConfigurationError(
            f"replica {root.replica_id} spans nodes and begins on node {root.node_rank}, which has "
            "no address; give NodeResources.address where the other nodes reach it"
        )
    return address
