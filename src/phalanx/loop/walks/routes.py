"""Where each output of a walk goes, and whether the walk makes sense: found once, from its sections.

An edge leads forward (to a node that runs later in the same iteration) or back (to the next
iteration of the innermost loop around both of its ends).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from phalanx.errors import ConfigurationError
from phalanx.loop.walks.sections import (
    NOWHERE,
    Edge,
    Loop,
    Node,
    Parallel,
    Section,
    Sequential,
)

Input = tuple[str, str]
"""A node's name and the name of one of its inputs."""


@dataclass(frozen=True)
class Place:
    """Where a node stands: the parts around it from the outside, each with the child taken."""

    node: Node
    path: tuple[tuple[Section, int], ...]

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """The loops around it, outermost first."""
        return tuple(part for part, _ in self.path if isinstance(part, Loop))


@dataclass(frozen=True)
class Route:
    """An edge of a node. `exits` are the loops that its value leaves on the way, innermost first;
    `back_in` is the loop for whose next iteration it is.
    """

    producer: str
    edge: Edge
    exits: tuple[Loop, ...] = ()
    back_in: str | None = None


def find_places(section: Section) -> Iterator[Place]:
    """Every node of a section, in the order in which it is written down."""

    def visit(part: Section, path: tuple[tuple[Section, int], ...]) -> Iterator[Place]:
        match part:
            case Node():
                yield Place(part, path)
            case Sequential(parts=children) | Parallel(branches=children):
                for index, child in enumerate(children):
                    yield from visit(child, (*path, (part, index)))
            case Loop(section=child):
                yield from visit(child, (*path, (part, 0)))

    return visit(section, ())


class Routes:
    """The routes of one walk, whose inputs from outside are named by `inputs`."""

    def __init__(self, walk: str, section: Section, inputs: tuple[str, ...]) -> None:
        self._walk = walk
        self.places: dict[str, Place] = {}
        for place in find_places(section):
            self._add(place)
        self.by_node: Mapping[str, tuple[Route, ...]] = {
            name: tuple(self._route(place, edge) for edge in place.node.outputs)
            for name, place in self.places.items()
        }
        self.backs: dict[str, list[Input]] = {}
        """The inputs that each loop feeds from one iteration to the next."""
        self.external: list[Input] = []
        """The inputs that the walk's own inputs feed."""
        self.unfed: dict[str, list[Input]] = {name: [] for name in self.places}
        """The inputs of each node that nothing in the walk feeds: they must be streams."""
        self._feed(inputs)
        self._check_loops()

    def _error(self, text: str) -> ConfigurationError:
        return ConfigurationError(f"walk {self._walk!r}: {text}")

    def _add(self, place: Place) -> None:
        name = place.node.name
        if name in self.places:
            raise self._error(f"node {name!r} stands in it twice; a walk names each node once")
        self.places[name] = place

    def _route(self, place: Place, edge: Edge) -> Route:
        name = place.node.name
        if edge.streaming:
            if edge.next_node in self.places:
                raise self._error(
                    f"edge {edge.name!r} of node {name!r} streams to {edge.next_node!r} in the same "
                    "walk; streams lead to other partitions"
                )
            return Route(name, edge)
        if not edge.leads_to_a_node:
            kept = edge.next_node == NOWHERE
            declared = any(edge.name in loop.leaving for loop in place.loops)
            loops = place.loops[::-1] if kept and declared else ()
            return Route(name, edge, self._exits(name, edge, loops))
        target = self.places.get(edge.next_node)
        if target is None:
            raise self._error(
                f"edge {edge.name!r} of node {name!r} leads to {edge.next_node!r}, which is not in "
                f"the walk; it has {sorted(self.places)}"
            )
        if edge.name not in target.node.inputs:
            raise self._error(
                f"edge {edge.name!r} of node {name!r} leads to {edge.next_node!r}, which takes "
                f"{list(target.node.inputs)}"
            )
        return self._route_between(place, target, edge)

    def _route_between(self, place: Place, target: Place, edge: Edge) -> Route:
        common = 0
        shared = min(len(place.path), len(target.path))
        while common < shared and place.path[common] == target.path[common]:
            common += 1
        around = [part for part, _ in place.path[:common] if isinstance(part, Loop)]
        parting = place.path[common][0] if common < shared else None
        forward = isinstance(parting, Sequential) and place.path[common][1] < target.path[common][1]
        inner = tuple(loop for loop in place.loops[::-1] if loop not in around)
        if forward:
            return Route(place.node.name, edge, self._exits(place.node.name, edge, inner))
        if not around:
            raise self._error(
                f"edge {edge.name!r} leads from {place.node.name!r} to {target.node.name!r}, which "
                "does not run after it, and no loop is around both"
            )
        exits = self._exits(place.node.name, edge, inner)
        return Route(place.node.name, edge, exits, around[-1].name)

    def _exits(self, name: str, edge: Edge, loops: tuple[Loop, ...]) -> tuple[Loop, ...]:
        for loop in loops:
            if edge.name not in loop.leaving:
                raise self._error(
                    f"edge {edge.name!r} of node {name!r} leaves loop {loop.name!r}; name it in "
                    "the loop's outputs or accumulated_outputs"
                )
        return loops

    def _feed(self, inputs: tuple[str, ...]) -> None:
        """Find what feeds every input, and refuse what is fed twice or has no first value."""
        edges = [
            route
            for routes in self.by_node.values()
            for route in routes
            if route.edge.leads_to_a_node and not route.edge.streaming
        ]
        forward = self._by_input([route for route in edges if route.back_in is None])
        back = self._by_input([route for route in edges if route.back_in is not None])
        for key, route in back.items():
            assert route.back_in is not None
            self.backs.setdefault(route.back_in, []).append(key)
            first = forward.get(key)
            if first is not None and route.back_in in self._loop_names(first.producer):
                raise self._fed_twice(key, first, route)
        wanted = [(name, one) for name, at in self.places.items() for one in at.node.inputs]
        rest = [key for key in wanted if key not in forward]
        self.external = [key for key in rest if key[1] in inputs]
        for key in (key for key in rest if key[1] not in inputs):
            self.unfed[key[0]].append(key)
            if key in back:
                raise self._error(
                    f"input {key[1]!r} of node {key[0]!r} is fed back by loop "
                    f"{back[key].back_in!r}, but nothing feeds its first iteration; make it an "
                    "input of the walk or feed it by an edge from before the loop"
                )
        unused = set(inputs) - {key[1] for key in self.external}
        if unused:
            raise self._error(f"no node takes its inputs {sorted(unused)}")

    def _by_input(self, routes: list[Route]) -> dict[Input, Route]:
        found: dict[Input, Route] = {}
        for route in routes:
            key = (route.edge.next_node, route.edge.name)
            if key in found:
                raise self._fed_twice(key, found[key], route)
            found[key] = route
        return found

    def _fed_twice(self, key: Input, first: Route, second: Route) -> ConfigurationError:
        return self._error(
            f"input {key[1]!r} of node {key[0]!r} is fed by both {first.producer!r} and "
            f"{second.producer!r}; an input has one producer"
        )

    def _loop_names(self, node: str) -> tuple[str, ...]:
        return tuple(loop.name for loop in self.places[node].loops)

    def _check_loops(self) -> None:
        loops: dict[str, Loop] = {}
        for place in self.places.values():
            for loop in place.loops:
                if loops.setdefault(loop.name, loop) is not loop:
                    raise self._error(f"two loops are called {loop.name!r}")
        routes = [route for routes in self.by_node.values() for route in routes]
        for loop in loops.values():
            leaving = {route.edge.name for route in routes if loop in route.exits}
            idle = [name for name in loop.leaving if name not in leaving]
            if idle:
                raise self._error(f"no edge that leaves loop {loop.name!r} is called {idle[0]!r}")
