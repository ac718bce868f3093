"""The machines of a cluster, and which of them stands for which node of a plan: pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.errors import RoleOperationFailedError
from phalanx.schema.job_placement import PlacementPlan
from phalanx.schema.roles import Ownership


class NoRoomError(RoleOperationFailedError):
    """The cluster has not got the devices now; it may have them later."""


@dataclass(frozen=True)
class Machine:
    """One that is alive: `address` is where others reach it, `free` of its `num_devices` are nobody's."""

    node_id: str
    address: str
    host_name: str
    num_devices: int
    free: int


def wanted_devices(plan: PlacementPlan) -> dict[str, int]:
    """How many devices of each node are in groups that are made here."""
    return dict(
        Counter(
            bundle.node
            for group in plan.groups
            if group.owner is not Ownership.EXTERNAL
            for bundle in group.bundles
        )
    )


def assign(wanted: Mapping[str, int], machines: Sequence[Machine]) -> dict[str, Machine]:
    """A machine of its own for each node, by the node's name.

    A node that is called by a machine's address, host name or id is that one. Any other gets the one
    with the fewest free devices that are enough. Raises `NoRoomError`.
    """
    chosen: dict[str, Machine] = {}
    for node in wanted:
        named = [each for each in machines if node in (each.address, each.host_name, each.node_id)]
        if len(named) == 1:
            chosen[node] = named[0]
    taken = {machine.node_id for machine in chosen.values()}
    rest = sorted(
        (machine for machine in machines if machine.node_id not in taken),
        key=lambda machine: (machine.free, machine.address),
    )
    for node, count in sorted(wanted.items(), key=lambda each: -each[1]):
        if node not in chosen:
            fitting = next((machine for machine in rest if machine.free >= count), None)
            if fitting is None:
                raise NoRoomError(_missing(wanted, machines))
            chosen[node] = fitting
            rest.remove(fitting)
    if any(chosen[node].free < count for node, count in wanted.items()):
        raise NoRoomError(_missing(wanted, machines))
    return {node: chosen[node] for node in wanted}


def free_devices(machines: Sequence[Machine]) -> str:
    """How many the cluster has free, and where, in words."""
    found = ", ".join(
        f"{machine.free} of {machine.num_devices} on {machine.address}"
        for machine in machines
        if machine.num_devices
    )
    total = sum(machine.free for machine in machines)
    return f"{total} free ({found or 'none of its machines has devices'})"


def _missing(wanted: Mapping[str, int], machines: Sequence[Machine]) -> str:
    asked = ", ".join(f"{count} on {node}" for node, count in wanted.items())
    total = sum(wanted.values())
    devices = "1 device" if total == 1 else f"{total} devices"
    return f"it needs {devices} ({asked}), and the cluster has {free_devices(machines)}"
