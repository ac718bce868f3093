"""Makes the placement groups of a plan on a Ray cluster and checks what became of them: all of them,
or none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.errors import ConfigurationError
from phalanx.roles.placement.reservations import shares
from phalanx.roles.ray_cluster.cluster import ACTOR_CPUS, RawGroup, RayCluster, bundle
from phalanx.roles.ray_cluster.groups import RayPlacementGroup
from phalanx.roles.ray_cluster.machines import Machine, NoRoomError, assign, wanted_devices
from phalanx.roles.ray_cluster.observed import Place, check_layout, matched
from phalanx.schema.job_placement import PlacementGroupPlan, PlacementPlan
from phalanx.schema.roles import Ownership

DEADLINE_S = 60.0
_PAUSE_S = 0.5


@dataclass(frozen=True)
class BoundPlacement:
    """A plan on real devices. `groups` are by the plan's names."""

    plan: PlacementPlan
    groups: Mapping[str, RayPlacementGroup]

    @property
    def node_ids(self) -> frozenset[str]:
        """The machines that have its bundles."""
        return frozenset(place.node_id for each in self.groups.values() for place in each.places)

    def group_of(self, role: str) -> RayPlacementGroup:
        """That in which a role runs; it has to exist."""
        return self.groups[self.plan.group_name(role)]

    def owned_by(self, owner: Ownership, role: str | None = None) -> tuple[RayPlacementGroup, ...]:
        """Those that `owner` has to delete: all, or the one of a role."""
        found = self.groups.values() if role is None else self._of(role)
        return tuple(group for group in found if group.owner is owner)

    def places(self, role: str, engine_id: str) -> tuple[Place, ...] | None:
        """Of a replica, rank by rank, also of one that its model is scaled to; None for one that the
        plan does not know.
        """
        for replica in (*self.plan.replicas, *self.plan.to_scale_into()):
            if (replica.role, replica.engine_id) == (role, engine_id):
                places = self.groups[replica.placement_group].places
                return tuple(places[index] for index in replica.bundle_indices)
        return None

    async def look_again(self, role: str) -> None:
        """As `RayPlacementGroup.look_again`, of the group of a role, as `plan` has it. Raises
        `PlacementMismatchError`.
        """
        await self.look_again_in(self.plan.group_name(role))

    async def look_again_in(self, name: str) -> None:
        """The same of a group by its name in the plan."""
        planned = self.plan.group(name)

        def check(places: Sequence[Place], machines: Mapping[str, Machine]) -> None:
            check_layout(self.plan, planned, places, machines)

        await self.groups[name].look_again(check)

    async def delete(self) -> None:
        """Delete all groups that were made for it, where nothing has begun to run there."""
        for group in self.groups.values():
            if group.owner is not Ownership.EXTERNAL:
                await group.delete()

    def _of(self, role: str) -> tuple[RayPlacementGroup, ...]:
        has = any(replica.role == role for replica in self.plan.replicas)
        return (self.group_of(role),) if has else ()


class RayBinder:
    """`job` is the name under which groups are known to others: `JOB-GROUP`, and of groups that are
    somebody else's just GROUP.
    """

    def __init__(self, cluster: RayCluster, job: str, deadline_s: float = DEADLINE_S) -> None:
        """The cluster has `deadline_s` to have devices free, and as long to reserve them."""
        self._cluster = cluster
        self._job = job
        self._deadline_s = deadline_s

    async def bind(self, plan: PlacementPlan) -> BoundPlacement:
        """Raises `NoRoomError` where the cluster has not got the devices in time,
        `PlacementMismatchError` where it gave others, and `ConfigurationError` for an external group
        that is not there. Then, and where this is cancelled, what was made is deleted.
        """
        assigned = await find_room(self._cluster, wanted_devices(plan), self._deadline_s)
        made: dict[str, RayPlacementGroup] = {}
        raw: list[RawGroup] = []
        try:
            for group in plan.groups:
                made[group.name] = await self._bind(plan, group, assigned, raw)
        except BaseException:
            await asyncio.shield(self._undo(raw))
            raise
        return BoundPlacement(plan, made)

    async def _bind(
        self,
        plan: PlacementPlan,
        group: PlacementGroupPlan,
        assigned: Mapping[str, Machine],
        made: list[RawGroup],
    ) -> RayPlacementGroup:
        if group.owner is Ownership.EXTERNAL:
            raw, theirs = self._cluster.find_group(group.name), True
            _check_external(plan, group, raw)
        else:
            raw, theirs = await self._create(group, assigned), False
            made.append(raw)
        found = await self._cluster.places(raw)
        places = matched(group, found, {} if theirs else assigned)
        machines = {machine.node_id: machine for machine in self._cluster.machines()}
        check_layout(plan, group, places, machines)
        return RayPlacementGroup(self._cluster, raw, group.owner, places)

    async def _create(self, group: PlacementGroupPlan, assigned: Mapping[str, Machine]) -> RawGroup:
        nodes = {each.node for each in group.bundles}
        # One for each user's actor, and one for a user that is still ending.
        cpus = ACTOR_CPUS * (len(group.users) + 1)
        return await self._cluster.create_group(
            f"{self._job}-{group.name}",
            [bundle(cpus, assigned[each.node].address) for each in group.bundles],
            "STRICT_PACK" if len(nodes) == 1 else "PACK",
            self._deadline_s,
        )

    async def _undo(self, made: list[RawGroup]) -> None:
        for raw in reversed(made):
            await self._cluster.remove_group(raw)


async def find_room(
    cluster: RayCluster, wanted: Mapping[str, int], deadline_s: float
) -> dict[str, Machine]:
    """As `assign`, as soon as the cluster has room; raises `NoRoomError` when the time is over."""
    due_s = asyncio.get_running_loop().time() + deadline_s
    while True:
        try:
            return assign(wanted, cluster.machines())
        except NoRoomError as error:
            if asyncio.get_running_loop().time() >= due_s:
                raise NoRoomError(
                    f"there is no room: {error}, also after {deadline_s:g} s; have machines join (`ray"
                    " start`), free devices there, or plan with what there is (phalanx plan)"
                ) from None
        # Machines join, and others' devices become free; Ray tells nobody.
        await asyncio.sleep(min(_PAUSE_S, deadline_s))


def _check_external(plan: PlacementPlan, group: PlacementGroupPlan, raw: RawGroup) -> None:
    if len(raw.bundles) != len(group.bundles):
        raise ConfigurationError(
            f"placement group {group.name!r} has {len(raw.bundles)} bundles, and the plan needs"
            f" {len(group.bundles)}; make it of that many bundles of one GPU each"
        )
    share = max(shares(plan).get(user, 0) for user in group.users)
    for index, given in enumerate(raw.bundles):
        if given.get("GPU", 0) < share or given.get("CPU", 0) < ACTOR_CPUS:
            raise ConfigurationError(
                f"bundle {index} of placement group {group.name!r} is {dict(given)}; it needs"
                f" GPU: {share:g} and CPU: {ACTOR_CPUS:g} or more"
            )
