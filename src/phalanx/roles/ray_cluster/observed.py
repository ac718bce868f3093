"""What a placement group has come to on real machines, checked against the plan: pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from phalanx.errors import RoleOperationFailedError
from phalanx.roles.ray_cluster.machines import Machine
from phalanx.schema.job_placement import (
    ACTOR_GROUP,
    TRAINER,
    Bundle,
    PlacementGroupPlan,
    PlacementPlan,
)


class PlacementMismatchError(RoleOperationFailedError):
    """The cluster gave other devices than the plan is about."""


@dataclass(frozen=True)
class Place:
    """One bundle of a group, by its number there: on which machine, and which device of it."""

    index: int
    node_id: str
    address: str
    device: int

    def __str__(self) -> str:
        return f"{self.address}:{self.device}"


@dataclass(frozen=True)
class NodePart:
    """The devices of a replica on one machine, rank by rank. `index` is the bundle of the first."""

    node_id: str
    address: str
    index: int
    devices: tuple[int, ...]


def matched(
    group: PlacementGroupPlan, places: Sequence[Place], assigned: Mapping[str, Machine]
) -> tuple[Place, ...]:
    """The places of a group in the order of the plan's bundles.

    A cluster numbers bundles as it likes: nodes are matched as whole ones, with `assigned` where that
    says something, and devices in the order of a node. Raises `PlacementMismatchError`.
    """
    seen = {(place.node_id, place.device) for place in places}
    if len(seen) < len(places):
        raise _mismatch(group.name, places, "two of its bundles are on one device")
    planned: dict[str, list[Bundle]] = {}
    for bundle in group.bundles:
        planned.setdefault(bundle.node, []).append(bundle)
    real: dict[str, list[Place]] = {}
    for place in sorted(places, key=lambda each: (each.address, each.device)):
        real.setdefault(place.node_id, []).append(place)
    by_bundle: dict[Bundle, Place] = {}
    for node, bundles in planned.items():
        node_id = _real_node(node, len(bundles), real, assigned)
        if node_id is None:
            counts = ", ".join(f"{len(each)} on {name}" for name, each in planned.items())
            raise _mismatch(group.name, places, f"it was planned with {counts}")
        own = sorted(bundles, key=lambda bundle: bundle.device)
        by_bundle.update(zip(own, real.pop(node_id), strict=True))
    return tuple(by_bundle[bundle] for bundle in group.bundles)


def replaced(places: Sequence[Place], found: Sequence[Place]) -> tuple[Place, ...]:
    """`places` with those that were `found` anew, on machines that took the place of lost ones, where
    devices keep their order.
    """
    new = {place.index: place for place in found}
    by_node: dict[str, list[int]] = {}
    for at, place in enumerate(places):
        if place.index in new:
            by_node.setdefault(place.node_id, []).append(at)
    result = list(places)
    for positions in by_node.values():
        before = sorted(positions, key=lambda at: places[at].device)
        after = sorted(
            (new[places[at].index] for at in positions),
            key=lambda place: (place.address, place.device),
        )
        for at, place in zip(before, after, strict=True):
            result[at] = place
    return tuple(result)


def check_layout(
    plan: PlacementPlan,
    group: PlacementGroupPlan,
    places: Sequence[Place],
    machines: Mapping[str, Machine],
) -> None:
    """Refuse what cuts through a replica or the trainer: devices that are not neighbours, a machine
    shared by two nodes, or a part of a machine where the plan has a whole node.

    `places` are in the order of the plan's bundles, `machines` those that are there, by their ids; who
    has bundles on others is not looked at. Raises `PlacementMismatchError`.
    """
    sizes = {node.name: node.num_devices for node in plan.cluster.nodes}
    for name, indices in _users(plan, group):
        mine = [(group.bundles[index], places[index]) for index in indices]
        if any(place.node_id not in machines for _, place in mine):
            continue
        for (bundle, place), (other, neighbour) in pairwise(mine):
            if bundle.node != other.node:
                if place.node_id == neighbour.node_id:
                    raise _mismatch(group.name, places, f"{name} has two nodes on one machine")
            elif other.device - bundle.device != neighbour.device - place.device:
                raise _mismatch(
                    group.name,
                    places,
                    f"the devices of {name} were planned as {bundle} and {other}",
                )
        nodes = {bundle.node: machines[place.node_id] for bundle, place in mine}
        for node, machine in nodes.items():
            if len(nodes) > 1 and name != TRAINER and machine.num_devices != sizes[node]:
                raise _mismatch(
                    group.name,
                    places,
                    f"{name} takes whole nodes, of which {node} was planned with {sizes[node]}"
                    f" devices, and {machine.address} has {machine.num_devices}",
                )


def parts_of(places: Sequence[Place]) -> tuple[NodePart, ...]:
    """A replica's machines, the head's first, with their devices rank by rank."""
    by_node: dict[str, list[Place]] = {}
    for place in places:
        by_node.setdefault(place.node_id, []).append(place)
    return tuple(
        NodePart(node_id, own[0].address, own[0].index, tuple(place.device for place in own))
        for node_id, own in by_node.items()
    )


def _users(plan: PlacementPlan, group: PlacementGroupPlan) -> list[tuple[str, tuple[int, ...]]]:
    users = [
        (f"{replica.role}/{replica.engine_id}", replica.bundle_indices)
        for replica in (*plan.replicas, *plan.to_scale_into())
        if replica.placement_group == group.name
    ]
    if group.name == ACTOR_GROUP and plan.trainer_bundles:
        users.append((TRAINER, plan.trainer_bundles))
    return users


def _real_node(
    node: str, count: int, real: Mapping[str, Sequence[Place]], assigned: Mapping[str, Machine]
) -> str | None:
    """The machine of a planned node, among those that no other node has."""
    candidates = [assigned[node].node_id] if node in assigned else list(real)
    return next((each for each in candidates if len(real.get(each, ())) == count), None)


def _mismatch(group: str, places: Sequence[Place], reason: str) -> PlacementMismatchError:
    given = ", ".join(map(str, places))
    return PlacementMismatchError(
        f"placement group {group!r} is not what was planned: {reason}, and the cluster gave {given};"
        " free the cluster's devices, or plan other ones (phalanx plan)"
    )
