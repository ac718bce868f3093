"""One walk of one request as it runs: which nodes are due, what they get, where their outputs go.

Inputs stay where they are until they are replaced, so that what comes from outside a loop is there
in each of its iterations. What leads back in a loop is handed over between two iterations, so that
the order in which parallel branches run cannot be seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from phalanx.errors import ConfigurationError, RequestFailedError
from phalanx.loop.walks.cursor import Cursor, LoopHooks
from phalanx.loop.walks.model import NextWalk, Values
from phalanx.loop.walks.routes import Input, Route
from phalanx.loop.walks.sections import Edge, Loop
from phalanx.loop.walks.walk_graph import WalkGraph


@dataclass
class _Turns:
    """A loop that runs: its present iteration, what waits for the next, and what leaves it."""

    bound: int
    iteration: int = 0
    stopped: bool = False
    pending: dict[Input, Values] = field(default_factory=dict)
    leaving: dict[tuple[str, Edge], tuple[Route, Values]] = field(default_factory=dict)


class WalkRun:
    """See the module. Raises `ConfigurationError` where `begun` does not fit the walk."""

    def __init__(self, graph: WalkGraph, begun: NextWalk) -> None:
        self.graph = graph
        self.stopped: set[str] = set()
        """The loops that nodes have ended."""
        self._bounds = begun.iterations
        self._given: dict[Input, Values] = self._first_values(begun)
        self._back: dict[Input, Values] = {}
        self._turns: dict[str, _Turns] = {}
        self._left: list[tuple[Edge, Values]] = []
        self._cursor = Cursor(graph.section, LoopHooks(self._begin, self._goes_on))

    @property
    def due(self) -> tuple[str, ...]:
        """The nodes that may run now."""
        return tuple(self._cursor.due)

    @property
    def ended(self) -> bool:
        return self._cursor.ended

    def values(self, node: str, name: str) -> Values | None:
        """What an input holds now; None for a stream."""
        key = (node, name)
        return self._back.get(key, self._given.get(key))

    def iterations(self, node: str) -> dict[str, int]:
        """The present iteration of each loop around a node, outermost first, from 0."""
        return {
            loop.name: self._turns[loop.name].iteration
            for loop in self.graph.routes.places[node].loops
        }

    def end(
        self, node: str, outputs: Mapping[str, Tensor], stopped: frozenset[str]
    ) -> list[tuple[Edge, Values]]:
        """A due node has run and ended the loops `stopped`; what leaves the walk by that, in order:
        for the client, for streams, and to be kept.
        """
        if stopped:
            self._stop(node, stopped)
        for route in self.graph.routes.by_node[node]:
            tensor = outputs.get(route.edge.name)
            if tensor is not None:
                self._deliver(route, (tensor,), 0)
            elif route.edge.leads_to_a_node and not route.edge.streaming:
                raise RequestFailedError(
                    f"node {node!r} of walk {self.graph.name!r} gave no {route.edge.name!r} for "
                    f"{route.edge.next_node!r}; it gave {sorted(outputs)}"
                )
        self._cursor.end(node)
        left, self._left = self._left, []
        return left

    def _stop(self, node: str, loops: frozenset[str]) -> None:
        around = [loop.name for loop in self.graph.routes.places[node].loops]
        for name in loops:
            if name not in around:
                raise ConfigurationError(
                    f"node {node!r} of walk {self.graph.name!r} ends loop {name!r}; "
                    f"the loops around it are {around}"
                )
            self._turns[name].stopped = True

    def _first_values(self, begun: NextWalk) -> dict[Input, Values]:
        graph = self.graph
        if set(begun.inputs) != set(graph.inputs):
            raise ConfigurationError(
                f"walk {graph.name!r} begins with the inputs {sorted(begun.inputs)}; "
                f"it takes {sorted(graph.inputs)}"
            )
        values = {
            name: (given,) if isinstance(given, Tensor) else tuple(given)
            for name, given in begun.inputs.items()
        }
        loops = {loop.name: loop for place in graph.routes.places.values() for loop in place.loops}
        for name, bound in begun.iterations.items():
            most = loops[name].max_iterations if name in loops else 0
            if not 1 <= bound <= most:
                raise ConfigurationError(
                    f"walk {graph.name!r}: {bound} iterations of loop {name!r}; its loops and "
                    f"their bounds are { ({one.name: one.max_iterations for one in loops.values()}) }"
                )
        return {key: values[key[1]] for key in graph.routes.external}

    def _deliver(self, route: Route, values: Values, num_left: int) -> None:
        """Hand values on that have left the first `num_left` loops of their way."""
        edge = route.edge
        if num_left < len(route.exits):
            loop = route.exits[num_left]
            leaving = self._turns[loop.name].leaving
            key = (route.producer, edge)
            if key in leaving and edge.name in loop.accumulated_outputs:
                values = leaving[key][1] + values
            leaving[key] = (route, values)
            return
        if route.back_in is not None:
            self._turns[route.back_in].pending[edge.next_node, edge.name] = values
        elif edge.leads_to_a_node and not edge.streaming:
            self._given[edge.next_node, edge.name] = values
        if edge.persist or edge.streaming or not edge.leads_to_a_node:
            self._left.append((edge, values))

    def _begin(self, loop: Loop) -> None:
        self._turns[loop.name] = _Turns(self._bounds.get(loop.name, loop.max_iterations))
        for key in self.graph.routes.backs.get(loop.name, ()):
            self._back.pop(key, None)

    def _goes_on(self, loop: Loop) -> bool:
        turns = self._turns[loop.name]
        if turns.stopped:
            self.stopped.add(loop.name)
        elif turns.iteration + 1 < turns.bound:
            turns.iteration += 1
            self._back.update(turns.pending)
            return True
        for route, values in turns.leaving.values():
            self._deliver(route, values, route.exits.index(loop) + 1)
        return False
