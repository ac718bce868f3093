"""A job's devices as its status shows them: what is held of simulated ones, and which the trainer has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from phalanx.device_ledger import DeviceLedger, DeviceMemory
from phalanx.errors import ConfigurationError
from phalanx.roles.control_messages import DeviceStatus, HeldMemory
from phalanx.roles.replica_devices import SimulatedCluster, real_trainer_devices
from phalanx.schema.job_placement import Bundle, PlacementPlan


class DevicesElsewhere(Protocol):
    """Devices of other machines, which are asked when somebody wants to know."""

    async def status(self) -> tuple[DeviceStatus, ...]:
        """Every one that the plan uses; of those that nobody can tell of, why."""
        ...


@dataclass(frozen=True)
class DeviceView:
    """Of a job with this plan, if it has one; `simulated` where its devices are, on this machine.
    `of_trainer` tells the trainer's variables on its machine of a cluster, which may come to be another,
    and `elsewhere` of the devices there.
    """

    plan: PlacementPlan | None = None
    simulated: SimulatedCluster | None = None
    of_trainer: Callable[[], Mapping[str, str]] | None = None
    elsewhere: DevicesElsewhere | None = None

    async def everywhere(self) -> tuple[DeviceStatus, ...]:
        """As `status`, and the devices of other machines."""
        return self.status() if self.elsewhere is None else await self.elsewhere.status()

    def status(self) -> tuple[DeviceStatus, ...]:
        """Every simulated device of this machine, node after node; none where they are real."""
        if self.simulated is None:
            return ()
        try:
            return tuple(_devices(self.simulated))
        except ConfigurationError:
            return ()  # somebody has removed the file

    def trainer_environment(self) -> dict[str, str]:
        """The variables that tell the trainer's program its devices."""
        if self.of_trainer is not None:
            return dict(self.of_trainer())
        if self.simulated is not None:
            return self.simulated.of_trainer()
        return {} if self.plan is None else real_trainer_devices(self.plan)


def _devices(simulated: SimulatedCluster) -> Iterator[DeviceStatus]:
    devices = DeviceLedger(simulated.file).devices()
    return map(device_status, simulated.plan.cluster.bundles(), devices)


def device_status(bundle: Bundle, memory: DeviceMemory, place: str | None = None) -> DeviceStatus:
    """Of a simulated device, as its ledger has it."""
    held = tuple(HeldMemory(one.owner, one.tag, one.num_bytes, one.pid) for one in memory.held)
    return DeviceStatus(
        bundle.node, bundle.device, memory.budget_bytes, memory.peak_bytes, held, place
    )
