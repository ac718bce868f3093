"""A walk, and a partition: the walks that advance together, one at a time, and what they stream."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.errors import ConfigurationError
from phalanx.loop.walks.chunk_policy import ChunkPolicy
from phalanx.loop.walks.routes import Input, Routes
from phalanx.loop.walks.sections import Section


@dataclass(frozen=True)
class WalkGraph:
    """One path through a model. `inputs` come from outside when the walk begins: each reaches every
    node that has an input of this name and no edge that leads there.

    Raises `ConfigurationError` where the sections do not make sense.
    """

    name: str
    section: Section
    inputs: tuple[str, ...] = ()
    routes: Routes = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigurationError("a walk has no name; give it one")
        object.__setattr__(self, "routes", Routes(self.name, self.section, self.inputs))

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of its nodes, as they are written down."""
        return tuple(self.routes.places)

    @property
    def unfed(self) -> tuple[Input, ...]:
        """The inputs that nothing in the walk feeds."""
        return tuple(key for keys in self.routes.unfed.values() for key in keys)


@dataclass(frozen=True)
class Stream:
    """An input of a node that takes chunks of what another partition streams to it."""

    node: str
    name: str
    policy: ChunkPolicy

    @property
    def key(self) -> Input:
        return self.node, self.name


@dataclass(frozen=True)
class Partition:
    """Walks of which a request is in one at a time, independent of its other partitions."""

    name: str
    walks: tuple[WalkGraph, ...]
    streams: tuple[Stream, ...] = ()

    def __post_init__(self) -> None:
        if not self.walks:
            raise ConfigurationError(f"partition {self.name!r} has no walks; give it at least one")
        keys = [stream.key for stream in self.streams]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigurationError(
                    f"partition {self.name!r} has two streams for input {key[1]!r} of node "
                    f"{key[0]!r}"
                )
        for walk in self.walks:
            for node, name in walk.unfed:
                if (node, name) not in keys:
                    raise ConfigurationError(
                        f"walk {walk.name!r}: nothing feeds input {name!r} of node {node!r}; lead "
                        "an edge there, make it an input of the walk or declare it as a stream of "
                        f"partition {self.name!r}"
                    )
        for stream in self.streams:
            if not any(stream.key in walk.unfed for walk in self.walks):
                raise ConfigurationError(
                    f"partition {self.name!r}: no node {stream.node!r} takes the stream "
                    f"{stream.name!r} in its walks {[walk.name for walk in self.walks]}"
                )
