"""Random walks of number nodes, and a plain interpreter of what each must give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hypothesis import strategies as st

from phalanx.loop.walks import (
    EMIT_TO_CLIENT,
    NOWHERE,
    Edge,
    Loop,
    Node,
    Parallel,
    Partition,
    Section,
    Sequential,
    WalkGraph,
)
from tests.loop.walks.number_nodes import NumberNode, Numbers, Run, number
from tests.loop.walks.tally import PRIME

MAX_NODES = 7


@dataclass
class Part:
    """A section in the making. `leaving` are the names that leave a loop: accumulated or not."""

    kind: str
    children: list[Part] = field(default_factory=list)
    name: str = ""
    bound: int = 1
    leaving: dict[str, bool] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    ends: str = ""
    stateful: bool = True
    path: list[tuple[Part, int]] = field(default_factory=list)

    @property
    def loops(self) -> list[Part]:
        return [part for part, _ in self.path if part.kind == "loop"]

    def section(self) -> Section:
        parts = tuple(child.section() for child in self.children)
        if self.kind == "node":
            return Node(self.name, tuple(self.inputs), tuple(self.edges))
        if self.kind == "loop":
            last = tuple(name for name, joined in self.leaving.items() if not joined)
            joined = tuple(name for name, joined in self.leaving.items() if joined)
            return Loop(self.name, parts[0], self.bound, last, joined)
        return Sequential(parts) if self.kind == "sequence" else Parallel(parts)


class RandomWalk:
    """A walk whose shape, edges and bounds are drawn."""

    def __init__(self, draw) -> None:
        self._draw = draw
        self._num_loops = 0
        self.inputs: set[str] = set()
        self.nodes: list[Part] = []
        self.root = self._part(0, [])
        for node in self.nodes:
            for _ in range(draw(st.integers(0, 2))):
                self._feed(node)
            self._end(node)
        self.graph = WalkGraph("w", self.root.section(), tuple(sorted(self.inputs)))

    def run(self) -> Run:
        nodes = {
            node.name: NumberNode(node.name, ident, node.edges, node.ends, node.stateful)
            for ident, node in enumerate(self.nodes)
        }
        return Run([Partition("p", (self.graph,))], nodes)

    def _part(self, depth: int, path: list[tuple[Part, int]]) -> Part:
        full = depth == 3 or len(self.nodes) >= MAX_NODES - 2
        kinds = ["node"] if full else ["node", "sequence", "parallel", "loop"]
        part = Part(self._draw(st.sampled_from(kinds)), path=path)
        if part.kind == "node":
            part.name = f"n{len(self.nodes)}"
            part.stateful = self._draw(st.booleans())
            self.nodes.append(part)
            return part
        count = 1
        if part.kind == "loop":
            part.name = f"l{self._num_loops}"
            self._num_loops += 1
            part.bound = self._draw(st.integers(1, 3))
        else:
            count = self._draw(st.integers(1, 3))
        for index in range(count):
            part.children.append(self._part(depth + 1, [*path, (part, index)]))
        return part

    def _feed(self, node: Part) -> None:
        """One more input of a node: from outside, from an earlier node, or from one iteration back."""
        choices = ["x0", "x1", *self.nodes]
        source = self._draw(st.sampled_from(choices))
        if isinstance(source, str):
            if source not in node.inputs:
                node.inputs.append(source)
                self.inputs.add(source)
            return
        name = f"{source.name}{node.name}"
        common = next(
            (i for i, (a, b) in enumerate(zip(source.path, node.path, strict=False)) if a != b),
            None,
        )
        forward = (
            common is not None
            and source.path[common][0].kind == "sequence"
            and source.path[common][1] < node.path[common][1]
        )
        around = [loop for loop in source.loops if loop in node.loops]
        if name in node.inputs or not (forward or around):
            return
        node.inputs.append(name)
        self._lead(source, node, name)
        if not forward:
            firsts = [one for one in self.nodes if self._feeds_first(one, node, around[-1])]
            first = self._draw(st.sampled_from([None, *firsts]))
            if first is None:
                self.inputs.add(name)
            else:
                self._lead(first, node, name)

    def _feeds_first(self, source: Part, node: Part, loop: Part) -> bool:
        """Whether a node can feed the first iteration of a loop around another one."""
        if loop in source.loops:
            return False
        for (a, i), (b, j) in zip(source.path, node.path, strict=False):
            if (a, i) != (b, j):
                return a is b and a.kind == "sequence" and i < j
        return False

    def _lead(self, source: Part, node: Part, name: str) -> None:
        source.edges.append(Edge(node.name, name, persist=self._draw(st.booleans())))
        for loop in source.loops:
            if loop not in node.loops:
                loop.leaving.setdefault(name, self._draw(st.booleans()))

    def _end(self, node: Part) -> None:
        if self._draw(st.booleans()):
            node.edges.append(Edge(EMIT_TO_CLIENT, f"e{node.name}"))
        if self._draw(st.booleans()):
            node.edges.append(Edge(NOWHERE, f"k{node.name}", persist=True))
            if self._draw(st.booleans()):
                for loop in node.loops:
                    loop.leaving[f"k{node.name}"] = self._draw(st.booleans())
        if node.loops and self._draw(st.booleans()):
            node.ends = self._draw(st.sampled_from([loop.name for loop in node.loops]))


class Interpreter:
    """Runs a walk twice, one node after the other, as `NumberModel` does."""

    def __init__(self, walk: RandomWalk, request: Numbers) -> None:
        self._idents = {node.name: ident for ident, node in enumerate(walk.nodes)}
        self._nodes = {node.name: node for node in walk.nodes}
        self._request = request
        self._tallies: dict[str, int] = {}
        self._stopped: set[str] = set()
        self.emitted: dict[str, list[int]] = {}
        self.kept: dict[str, tuple[int, ...]] = {}
        for _ in range(2):
            plus = sum(sum(values) for values in self.kept.values())
            self._given: dict[tuple[str, str], tuple[int, ...]] = {
                (node.name, name): (request.inputs[name] + plus,)
                for node in walk.nodes
                for name in node.inputs
                if name in request.inputs
            }
            self._back: dict[tuple[str, str], tuple[int, ...]] = {}
            self._leaving: dict[str, dict] = {}
            self._next: dict[str, dict] = {}
            self._run(walk.root)

    def _run(self, part: Part) -> None:
        if part.kind == "node":
            self._compute(part)
        elif part.kind == "loop":
            self._repeat(part)
        else:
            for child in part.children:
                self._run(child)

    def _repeat(self, loop: Part) -> None:
        self._leaving[loop.name], self._next[loop.name] = {}, {}
        inside = [node for node in self._nodes.values() if loop in node.loops]
        for node in inside:
            for name in node.inputs:
                if self._loop_of(node, name) is loop:
                    self._back.pop((node.name, name), None)
        bound = self._request.iterations.get(loop.name, loop.bound)
        for _ in range(bound):
            self._back.update(self._next[loop.name])
            self._stopped.discard(loop.name)
            self._run(loop.children[0])
            if loop.name in self._stopped:
                break
        for node, edge, values in self._leaving[loop.name].values():
            self._hand_on(node, edge, values, node.loops[: node.loops.index(loop)])

    def _loop_of(self, node: Part, name: str) -> Part | None:
        """The loop that feeds an input back, if one does."""
        for source in self._nodes.values():
            if any((one.next_node, one.name) == (node.name, name) for one in source.edges):
                loop = self._back_loop(source, node)
                if loop is not None:
                    return loop
        return None

    def _back_loop(self, source: Part, node: Part) -> Part | None:
        for (a, i), (b, j) in zip(source.path, node.path, strict=False):
            if (a, i) != (b, j) and a.kind == "sequence" and i < j:
                return None
            if (a, i) != (b, j):
                break
        around = [loop for loop in source.loops if loop in node.loops]
        return around[-1] if around else None

    def _compute(self, node: Part) -> None:
        values = [
            self._back.get((node.name, name), self._given.get((node.name, name)))
            for name in sorted(node.inputs)
        ]
        tally = self._tallies.get(node.name, 0) if node.stateful else 0
        made = number(self._idents[node.name], tally, values)
        self._tallies[node.name] = (tally * 31 + made) % PRIME
        if node.ends and made % 5 == 0:
            self._stopped.add(node.ends)
        for edge in node.edges:
            if edge.next_node == EMIT_TO_CLIENT:
                self.emitted.setdefault(edge.name, []).append(made)
            else:
                self._hand_on(node, edge, (made,), node.loops)

    def _hand_on(self, node: Part, edge: Edge, values: tuple[int, ...], loops: list[Part]) -> None:
        """A value that is in `loops` now, on its way out of them."""
        target = self._nodes.get(edge.next_node)
        leaves = loops and (
            loops[-1] not in target.loops if target else edge.name in loops[-1].leaving
        )
        if leaves:
            loop = loops[-1]
            key = (node.name, edge.next_node, edge.name)
            if loop.leaving[edge.name] and key in self._leaving[loop.name]:
                values = self._leaving[loop.name][key][2] + values
            self._leaving[loop.name][key] = (node, edge, values)
            return
        if edge.persist:
            self.kept[edge.name] = values
        if target:
            loop = self._back_loop(node, target)
            if loop is not None:
                self._next[loop.name][target.name, edge.name] = values
            else:
                self._given[target.name, edge.name] = values


def requests(walk: RandomWalk) -> st.SearchStrategy[Numbers]:
    """Requests for a walk, with the inputs that it takes."""
    loops = {loop.name: loop.bound for node in walk.nodes for loop in node.loops}
    return st.builds(
        Numbers,
        inputs=st.fixed_dictionaries({name: st.integers(0, 99) for name in walk.inputs}),
        iterations=st.fixed_dictionaries(
            {}, optional={name: st.integers(1, bound) for name, bound in loops.items()}
        ),
    )


def expected(walk: RandomWalk, request: Numbers) -> Mapping[str, list[int]]:
    return Interpreter(walk, request).emitted
