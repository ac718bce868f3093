"""All walks of a model, checked as a whole against its nodes and resources."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from phalanx.errors import ConfigurationError
from phalanx.loop.walks.routes import Input
from phalanx.loop.walks.walk_graph import Partition, Stream, WalkGraph
from phalanx.step.resources.base import ResourceSpec


class WalkProgram:
    """The partitions of a model, for all its requests. `nodes` are the loaded nodes and `specs`
    their resources, as they are given to `StepEngine.load_model`.

    Raises `ConfigurationError` where a node is unknown or in no walk, a name is taken twice, or a
    stream has no producer, no consumer, or several of one of them.
    """

    def __init__(
        self,
        partitions: Sequence[Partition],
        nodes: Collection[str],
        specs: Sequence[ResourceSpec] = (),
    ) -> None:
        self.partitions: Mapping[str, Partition] = {one.name: one for one in partitions}
        self.stateful = frozenset().union(*(spec.nodes for spec in specs))
        """The nodes that have resources: what they have computed can be lost and done again."""
        self.streams: dict[Input, Stream] = {}
        self.fed_by: dict[Input, str] = {}
        """The partition that feeds each stream."""
        self.taken_by: dict[Input, str] = {}
        """The partition that takes it in chunks."""
        _refuse_doubles("partitions", [one.name for one in partitions])
        walks = [walk for one in partitions for walk in one.walks]
        _refuse_doubles("walks", [walk.name for walk in walks])
        _check_nodes(walks, nodes)
        for partition in partitions:
            self._add_streams(partition)
        for partition in partitions:
            for walk in partition.walks:
                self._add_producers(partition, walk)
        for (node, name), stream in self.streams.items():
            if stream.key not in self.fed_by:
                raise ConfigurationError(
                    f"no node streams {name!r} to node {node!r}, which takes it in chunks"
                )

    def walk(self, partition: str, name: str) -> WalkGraph:
        """A walk of a partition, by name."""
        walks = {walk.name: walk for walk in self.partitions[partition].walks}
        if name not in walks:
            raise ConfigurationError(
                f"partition {partition!r} has no walk {name!r}; it has {sorted(walks)}"
            )
        return walks[name]

    def streams_of(self, partition: str) -> tuple[Input, ...]:
        """The streams that a partition feeds."""
        return tuple(key for key, producer in self.fed_by.items() if producer == partition)

    def _add_streams(self, partition: Partition) -> None:
        for stream in partition.streams:
            if stream.key in self.streams:
                raise ConfigurationError(
                    f"two partitions take the stream {stream.name!r} at node {stream.node!r}"
                )
            self.streams[stream.key] = stream
            self.taken_by[stream.key] = partition.name

    def _add_producers(self, partition: Partition, walk: WalkGraph) -> None:
        producers: dict[Input, str] = {}
        edges = [
            (node, route.edge)
            for node, routes in walk.routes.by_node.items()
            for route in routes
            if route.edge.streaming
        ]
        for node, edge in edges:
            key = (edge.next_node, edge.name)
            stream = self.streams.get(key)
            if stream is None or stream in partition.streams:
                raise ConfigurationError(
                    f"walk {walk.name!r}: node {node!r} streams {edge.name!r} to "
                    f"{edge.next_node!r}, but no other partition declares Stream"
                    f"({edge.next_node!r}, {edge.name!r}, ...)"
                )
            owner = self.fed_by.setdefault(key, partition.name)
            first = producers.setdefault(key, node)
            if (owner, first) != (partition.name, node):
                raise ConfigurationError(
                    f"stream {edge.name!r} of node {edge.next_node!r} is fed by both "
                    f"{first if first != node else owner!r} and {node!r} in partition "
                    f"{partition.name!r}; a stream has one producer at a time"
                )


def _check_nodes(walks: Sequence[WalkGraph], nodes: Collection[str]) -> None:
    for walk in walks:
        unknown = [name for name in walk.nodes if name not in nodes]
        if unknown:
            raise ConfigurationError(
                f"walk {walk.name!r} names node {unknown[0]!r}; there are {sorted(nodes)}"
            )
    named = {name for walk in walks for name in walk.nodes}
    unreachable = [name for name in nodes if name not in named]
    if unreachable:
        raise ConfigurationError(f"no walk reaches the nodes {sorted(unreachable)}")


def _refuse_doubles(what: str, names: Sequence[str]) -> None:
    doubles = {name for name in names if names.count(name) > 1}
    if doubles:
        raise ConfigurationError(f"two {what} are called {sorted(doubles)[0]!r}")
