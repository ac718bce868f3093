"""The ledgers of simulated devices on a cluster: one on each machine that a plan uses, made there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from phalanx.errors import RoleOperationFailedError
from phalanx.roles.ray_cluster.cluster import RayCluster
from phalanx.roles.ray_cluster.host import Ledger, make_ledger
from phalanx.roles.ray_cluster.machines import Machine


class MachineLedgers:
    """By node ids. Without `device_bytes` devices are real, and there are none."""

    def __init__(self, cluster: RayCluster, logs: Path, device_bytes: int | None) -> None:
        """`logs` is a directory of every machine."""
        self._cluster = cluster
        self._logs = logs
        self._device_bytes = device_bytes
        self._ledgers: dict[str, Ledger] = {}
        self._making = asyncio.Lock()

    def of(self, node_id: str) -> Ledger | None:
        """None where devices are real."""
        return self._ledgers.get(node_id)

    async def have(self, node_ids: Iterable[str]) -> None:
        """Make those of these machines that are missing. Raises `RoleOperationFailedError`."""
        if self._device_bytes is None:
            return
        async with self._making:
            wanted = set(node_ids) - self._ledgers.keys()
            for machine in self._cluster.machines() if wanted else ():
                if machine.node_id in wanted:
                    await self._make(machine, self._device_bytes)

    async def _make(self, machine: Machine, device_bytes: int) -> None:
        file = self._logs / f"devices-{machine.node_id[:12]}"
        ledger = Ledger(str(file), machine.num_devices, device_bytes)
        problem = await self._cluster.run_on(machine.node_id, make_ledger, ledger)
        if problem:
            raise RoleOperationFailedError(problem)
        self._ledgers[machine.node_id] = ledger
