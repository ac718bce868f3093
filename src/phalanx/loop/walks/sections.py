"""The parts that a walk is written down with: nodes and their edges, in sequence, in parallel, in
loops. Frozen declarations without behaviour; what does not hold within one part is refused here.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import ConfigurationError

EMIT_TO_CLIENT = "@client"
"""As an edge's destination: the value is part of the request's output."""

NOWHERE = ""
"""As an edge's destination: the value is only kept, for later walks."""


@dataclass(frozen=True)
class Edge:
    """One output of a node and where it goes: to the input of the same name of `next_node`.

    `persist`: the value also survives the walk, under its name, for the model to start others with.
    `streaming`: `next_node` is in another partition, and gets the values in chunks. `modality` tells
    the model what kind of output an edge to `EMIT_TO_CLIENT` carries.
    """

    next_node: str
    name: str
    persist: bool = False
    streaming: bool = False
    modality: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigurationError(f"an edge to {self.next_node!r} has no name; give it one")
        if self.next_node == NOWHERE and not self.persist:
            raise ConfigurationError(
                f"edge {self.name!r} leads nowhere and persists nothing; leave it out"
            )
        if self.streaming and not self.leads_to_a_node:
            raise ConfigurationError(
                f"edge {self.name!r} streams to {self.next_node!r}; a stream leads to a node"
            )
        if self.modality and self.next_node != EMIT_TO_CLIENT:
            raise ConfigurationError(
                f"edge {self.name!r} to {self.next_node!r} has the modality {self.modality!r}; "
                "only edges to EMIT_TO_CLIENT have one"
            )

    @property
    def leads_to_a_node(self) -> bool:
        return self.next_node not in (EMIT_TO_CLIENT, NOWHERE)


@dataclass(frozen=True)
class Node:
    """A node of the engine at its place in a walk: what it takes by name, and where outputs go.

    A step may compute a part of a `divisible` node's tokens; what such a part gives is dropped, and
    that of the last one counts.
    """

    name: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[Edge, ...] = ()
    divisible: bool = False

    def __post_init__(self) -> None:
        if not self.name or self.name == EMIT_TO_CLIENT:
            raise ConfigurationError(f"a node cannot be called {self.name!r}")
        _refuse_doubles(f"node {self.name!r} has the inputs", self.inputs)
        edges = tuple(f"{edge.name} to {edge.next_node or 'nowhere'}" for edge in self.outputs)
        _refuse_doubles(f"node {self.name!r} has the edges", edges)


@dataclass(frozen=True)
class Sequential:
    """Parts that run one after the other."""

    parts: tuple[Section, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ConfigurationError("Sequential has no parts; give it at least one")


@dataclass(frozen=True)
class Parallel:
    """Branches that do not wait for each other; it ends when all have."""

    branches: tuple[Section, ...]

    def __post_init__(self) -> None:
        if not self.branches:
            raise ConfigurationError("Parallel has no branches; give it at least one")


@dataclass(frozen=True)
class Loop:
    """A section that runs up to `max_iterations` times, or until a node says that it has ended.

    The iteration in which it is said is finished. Edges that lead back in the section are for the
    next iteration; what comes from outside is there in each. Values that leave the loop are named:
    of `outputs` the last iteration's, of `accumulated_outputs` those of all iterations in order.
    What is emitted or streamed goes out at once.
    """

    name: str
    section: Section
    max_iterations: int
    outputs: tuple[str, ...] = ()
    accumulated_outputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigurationError("a loop has no name; give it one")
        if self.max_iterations < 1:
            raise ConfigurationError(
                f"loop {self.name!r}: max_iterations={self.max_iterations} must be at least 1"
            )
        _refuse_doubles(f"loop {self.name!r} has the outputs", self.leaving)

    @property
    def leaving(self) -> tuple[str, ...]:
        return self.outputs + self.accumulated_outputs


Section = Node | Sequential | Parallel | Loop


def _refuse_doubles(what: str, names: tuple[str, ...]) -> None:
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise ConfigurationError(f"{what} {list(names)}; name {doubles[0]!r} once")
