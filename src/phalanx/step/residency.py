"""Where requests' state is: on the device, or moved to the host by the resources that can."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from phalanx.step.resources.base import Evictable, Resource


class Residency:
    """Moves whole requests; asks every evictable resource, in dependency order.

    Numbers are in the resources' own units, so that sums are for comparing with zero only.
    """

    def __init__(
        self, resources: Mapping[str, Resource], nodes: Mapping[str, Collection[str]]
    ) -> None:
        """`nodes` has the keys of each node's own resources."""
        self._evictable = {
            key: resource for key, resource in resources.items() if isinstance(resource, Evictable)
        }
        self._nodes = {name: frozenset(keys) for name, keys in nodes.items()}

    def evictable(self, node: str) -> bool:
        """Whether some resource of the node can move a request's state."""
        return not self._nodes[node].isdisjoint(self._evictable)

    def is_offloaded(self, rid: str) -> bool:
        """Whether some of the request's state is away."""
        return any(resource.is_offloaded(rid) for resource in self._evictable.values())

    def offload(self, rid: str) -> int:
        """Move what can be moved; 0 where that is nothing, so that another should be chosen."""
        return sum(resource.offload(rid) for resource in self._evictable.values())

    def reload(self, rid: str) -> bool:
        """Bring everything back; False, and all stays away, where a resource has no room for it."""
        returned: list[Evictable] = []
        for resource in self._evictable.values():
            if not resource.is_offloaded(rid):
                continue
            if not resource.reload(rid):
                for earlier in returned:
                    earlier.offload(rid)
                return False
            returned.append(resource)
        return True

    def reclaimable(self, node: str, rid: str, affected: Collection[str] | None = None) -> int:
        """What the request holds of the node's resources, or of the `affected` ones among them."""
        keys = self._nodes[node] if affected is None else self._nodes[node].intersection(affected)
        return sum(
            resource.reclaimable(rid) for key, resource in self._evictable.items() if key in keys
        )

    def offload_priority(self, rid: str, resource: str) -> float:
        """How rather this request is offloaded, by one resource's measure; 0.0 if it has none."""
        found = self._evictable.get(resource)
        return 0.0 if found is None else found.offload_priority(rid)
