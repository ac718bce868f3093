"""The placement groups of a job on Ray, each with its owner, who alone deletes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from phalanx.roles.ray_cluster.cluster import RawGroup, RayCluster
from phalanx.roles.ray_cluster.machines import Machine
from phalanx.roles.ray_cluster.observed import Place, replaced
from phalanx.schema.roles import Ownership


class RayPlacementGroup:
    """Implements `contracts.PlacementGroup`."""

    def __init__(
        self, cluster: RayCluster, raw: RawGroup, owner: Ownership, places: Sequence[Place]
    ) -> None:
        """`places` are those of the plan's bundles, in the plan's order."""
        self.raw = raw
        self._places = tuple(places)
        self._cluster = cluster
        self._owner = owner
        self._looking = asyncio.Lock()
        self._deleting = asyncio.Lock()
        self._deleted = False

    @property
    def name(self) -> str:
        """What it is called in Ray."""
        return self.raw.name

    @property
    def owner(self) -> Ownership:
        return self._owner

    @property
    def places(self) -> tuple[Place, ...]:
        """In the order of the plan's bundles, as they were found last."""
        return self._places

    def is_there(self, places: Sequence[Place]) -> bool:
        """Whether these are where they were found."""
        nodes = self._cluster.nodes_of(self.raw)
        return all(nodes.get(place.index) == place.node_id for place in places) and all(
            self._cluster.is_alive(node) for node in {place.node_id for place in places}
        )

    async def look_again(
        self, check: Callable[[Sequence[Place], Mapping[str, Machine]], None]
    ) -> None:
        """Find the bundles of lost machines on those that have joined in their place. `check` is told
        all places, in the plan's order, and the machines by their ids, and raises where these cannot
        be; then, and where Ray has not put a bundle anywhere yet, it counts as lost still.
        """
        async with self._looking:
            machines = {machine.node_id: machine for machine in self._cluster.machines()}
            nodes = self._cluster.nodes_of(self.raw)
            moved = [
                place.index
                for place in self._places
                if nodes.get(place.index) in machines and nodes[place.index] != place.node_id
            ]
            if moved:
                found = await self._cluster.places(self.raw, moved)
                places = replaced(self._places, found)
                check(places, machines)
                self._places = places

    async def delete(self) -> None:
        """Raises `RoleOperationFailedError` where Ray does not do it; then it can be asked again."""
        assert self._owner is not Ownership.EXTERNAL, "somebody else deletes it"
        async with self._deleting:
            if not self._deleted:
                await self._cluster.remove_group(self.raw)
                self._deleted = True
