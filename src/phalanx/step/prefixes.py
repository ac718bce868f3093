"""What resources know of requests' tokens before they are computed, by node."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from phalanx.step.resources.base import Prefixed, Resource


class Prefixes:
    """Lets requests skip tokens. A node takes part if exactly one of its resources knows tokens, and
    all others can skip them.
    """

    def __init__(
        self, resources: Mapping[str, Resource], nodes: Mapping[str, Collection[str]]
    ) -> None:
        """`nodes` has the keys of each node's own resources."""
        self._prefixed = {
            key: resource for key, resource in resources.items() if isinstance(resource, Prefixed)
        }
        self._nodes = {
            name: [resources[key] for key in keys]
            for name, keys in nodes.items()
            if len(self._prefixed.keys() & keys) == 1
        }

    def adoptable(self, node: str) -> bool:
        """Whether requests at this node can skip tokens at all."""
        return node in self._nodes

    def adopt(self, node: str, rid: str) -> int:
        """Take over what is known of the request's next tokens; returns how many tokens that is.

        The node's resources are then as if these tokens had been computed.
        """
        resources = self._nodes.get(node, ())
        if not all(resource.skips for resource in resources):
            return 0
        for source in resources:
            if isinstance(source, Prefixed):
                count = source.adopt(rid)
                for other in resources if count else ():
                    if other is not source:
                        other.skip(rid, count)
                return count
        return 0

    def forget(self) -> None:
        """Keep nothing of what requests have computed so far."""
        for resource in self._prefixed.values():
            resource.forget()
