"""The placement groups of a job on Ray, each with its owner, who alone deletes it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from phalanx.roles.ray_cluster.cluster import RawGroup, RayCluster
from phalanx.roles.ray_cluster.observed import Place
from phalanx.schema.roles import Ownership


class RayPlacementGroup:
    """Implements `contracts.PlacementGroup`."""

    def __init__(
        self, cluster: RayCluster, raw: RawGroup, owner: Ownership, places: Sequence[Place]
    ) -> None:
        """`places` are those of the plan's bundles, in the plan's order."""
        self.raw = raw
        self.places = tuple(places)
        self._cluster = cluster
        self._owner = owner
        self._deleting = asyncio.Lock()
        self._deleted = False

    @property
    def name(self) -> str:
        """What it is called in Ray."""
        return self.raw.name

    @property
    def owner(self) -> Ownership:
        return self._owner

    def is_there(self, places: Sequence[Place]) -> bool:
        """Whether these are where they were found."""
        nodes = self._cluster.nodes_of(self.raw)
        return all(nodes.get(place.index) == place.node_id for place in places) and all(
            self._cluster.is_alive(node) for node in {place.node_id for place in places}
        )

    async def delete(self) -> None:
        """Raises `RoleOperationFailedError` where Ray does not do it; then it can be asked again."""
        assert self._owner is not Ownership.EXTERNAL, "somebody else deletes it"
        async with self._deleting:
            if not self._deleted:
                await self._cluster.remove_group(self.raw)
                self._deleted = True
