"""Several machines of a Ray cluster on this one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ray.cluster_utils import Cluster

from phalanx.roles.ray_cluster.cluster import ACTORS_ALONE, RayCluster

HEAD = "127.0.0.4"
"""Ray takes 127.0.0.1 for the machine's own address, wherever that is."""
STORE_BYTES = 80 * 1024 * 1024
SYSTEM = {
    # A machine is lost for who has not answered five times; who has ended answers none at once.
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 200,
    **ACTORS_ALONE,
}


class Machines:
    """The machines of a cluster, by their addresses. The head has no devices."""

    def __init__(self, devices: dict[str, int]) -> None:
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 2,
                "num_gpus": 0,
                "node_ip_address": HEAD,
                "object_store_memory": STORE_BYTES,
                "include_dashboard": False,
                "no_monitor": True,
                "include_log_monitor": False,
                "_system_config": SYSTEM,
            },
        )
        self._nodes: dict[str, object] = {}
        for address, count in devices.items():
            self.add(address, count)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of those with devices."""
        return tuple(self._nodes)

    @property
    def address(self) -> str:
        return self._cluster.address

    def add(self, address: str, count: int) -> None:
        self._nodes[address] = self._cluster.add_node(
            num_cpus=2,
            num_gpus=count,
            node_ip_address=address,
            object_store_memory=STORE_BYTES,
        )

    def lose(self, address: str) -> None:
        """As when a machine breaks."""
        self._cluster.remove_node(self._nodes.pop(address), allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()


@contextlib.contextmanager
def connected(devices: dict[str, int]) -> Iterator[tuple[Machines, RayCluster]]:
    machines = Machines(devices)
    try:
        cluster = RayCluster(machines.address, "phalanx-tests", None)
        try:
            yield machines, cluster
        finally:
            cluster.close()
    finally:
        machines.close()
