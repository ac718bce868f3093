"""What a walk, a partition or a program of walks is refused for, and how it is said."""

from __future__ import annotations

import pytest

from phalanx.errors import ConfigurationError
from phalanx.loop.walks import (
    EMIT_TO_CLIENT,
    NOWHERE,
    Edge,
    Fixed,
    Loop,
    Node,
    Parallel,
    Partition,
    Sequential,
    Stream,
    WalkGraph,
    WalkProgram,
)


def node(name: str, inputs: str = "", **edges: str) -> Node:
    """A node with the inputs named by words, and an edge x to node y for each `x="y"`."""
    outputs = tuple(Edge(to, name) for name, targets in edges.items() for to in targets.split())
    return Node(name, tuple(inputs.split()), outputs)


def walk(*parts, inputs: str = "", name: str = "w") -> WalkGraph:
    return WalkGraph(name, Sequential(parts), tuple(inputs.split()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Edge("b", ""), "has no name"),
        (lambda: Edge(NOWHERE, "x"), "leads nowhere and persists nothing"),
        (lambda: Edge(EMIT_TO_CLIENT, "x", streaming=True), "a stream leads to a node"),
        (lambda: Edge("b", "x", modality="text"), "only edges to EMIT_TO_CLIENT have one"),
        (lambda: Node(""), "cannot be called ''"),
        (lambda: Node("a", ("x", "x")), "name 'x' once"),
        (lambda: Node("a", (), (Edge("b", "x"), Edge("b", "x"))), "name 'x to b' once"),
        (lambda: Sequential(()), "Sequential has no parts"),
        (lambda: Parallel(()), "Parallel has no branches"),
        (lambda: Loop("", Node("a"), 1), "a loop has no name"),
        (lambda: Loop("l", Node("a"), 0), "max_iterations=0 must be at least 1"),
        (lambda: Loop("l", Node("a"), 1, ("x",), ("x",)), "name 'x' once"),
        (lambda: WalkGraph("", Node("a")), "a walk has no name"),
    ],
)
def test_parts(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: walk(node("a", x="b")), "leads to 'b', which is not in the walk; it has .'a'."),
        (lambda: walk(node("a", x="b"), node("b", "y")), "leads to 'b', which takes .'y'."),
        (lambda: walk(node("a"), node("a")), "stands in it twice"),
        (
            lambda: walk(node("a", x="c"), node("b", x="c"), node("c", "x")),
            "input 'x' of node 'c' is fed by both 'a' and 'b'",
        ),
        (
            lambda: walk(Loop("l", Sequential((node("a", x="b"), node("b", "x", x="b"))), 2)),
            "input 'x' of node 'b' is fed by both 'a' and 'b'",
        ),
        (
            lambda: walk(Loop("l", node("a", "x", x="a"), 2)),
            "fed back by loop 'l', but nothing feeds its first iteration",
        ),
        (
            lambda: walk(node("b", "x"), node("a", x="b")),
            "leads from 'a' to 'b', which does not run after it, and no loop is around both",
        ),
        (
            lambda: walk(Parallel((node("a", x="b"), node("b", "x")))),
            "which does not run after it, and no loop is around both",
        ),
        (
            lambda: walk(Loop("l", node("a", x="b"), 2), node("b", "x")),
            "edge 'x' of node 'a' leaves loop 'l'; name it in the loop's outputs",
        ),
        (
            lambda: walk(Loop("l", Loop("m", node("a", x="b"), 2, ("x",)), 2), node("b", "x")),
            "leaves loop 'l'",
        ),
        (
            lambda: walk(Loop("l", node("a"), 2, ("x",))),
            "no edge that leaves loop 'l' is called 'x'",
        ),
        (
            lambda: walk(Loop("l", node("a"), 2), Loop("l", node("b"), 2)),
            "two loops are called 'l'",
        ),
        (lambda: walk(node("a", "x"), inputs="x y"), "no node takes its inputs .'y'."),
        (
            lambda: walk(Node("a", (), (Edge("b", "x", streaming=True),)), node("b", "x")),
            "streams to 'b' in the same walk",
        ),
    ],
)
def test_walks(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_what_is_allowed():
    """Both an edge and the walk's own input of one name; nested loops; an edge back from an inner one."""
    inner = Loop("m", node("b", "x y", y="b a"), 2, ("y",))
    graph = walk(Loop("l", Sequential((node("a", "x y", x="b"), inner)), 3), inputs="x y")
    assert graph.nodes == ("a", "b")
    assert graph.routes.external == [("a", "x"), ("a", "y"), ("b", "y")]
    assert graph.routes.backs == {"m": [("b", "y")], "l": [("a", "y")]}


def producer(name: str = "w", to: str = "c", nodes: str = "p") -> WalkGraph:
    edge = Edge(to, "x", streaming=True)
    return walk(*(Node(one, (), (edge,)) for one in nodes.split()), name=name)


def consumer(name: str = "c", walk_name: str = "v") -> Partition:
    graph = walk(node(name, "x"), name=walk_name)
    return Partition(f"of {name}", (graph,), (Stream(name, "x", Fixed(2)),))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Partition("p", ()), "partition 'p' has no walks"),
        (
            lambda: Partition("p", (walk(node("a", "x")),)),
            "walk 'w': nothing feeds input 'x' of node 'a'",
        ),
        (
            lambda: Partition("p", (walk(node("a")),), (Stream("a", "x", Fixed(1)),)),
            "no node 'a' takes the stream 'x' in its walks .'w'.",
        ),
        (
            lambda: Partition(
                "p",
                (walk(node("a", "x")),),
                (Stream("a", "x", Fixed(1)), Stream("a", "x", Fixed(2))),
            ),
            "has two streams for input 'x' of node 'a'",
        ),
    ],
)
def test_partitions(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


@pytest.mark.parametrize(
    ("partitions", "nodes", "message"),
    [
        ([Partition("p", (walk(node("a")),))], "b", "walk 'w' names node 'a'; there are .'b'."),
        ([Partition("p", (walk(node("a")),))], "a b c", "no walk reaches the nodes .'b', 'c'."),
        (
            [Partition("p", (walk(node("a")),)), Partition("p", (walk(node("a"), name="v"),))],
            "a",
            "two partitions are called 'p'",
        ),
        (
            [Partition("p", (walk(node("a")),)), Partition("q", (walk(node("a")),))],
            "a",
            "two walks are called 'w'",
        ),
        (
            [Partition("p", (producer(),))],
            "p",
            "node 'p' streams 'x' to 'c', but no other partition declares Stream",
        ),
        ([consumer()], "c", "no node streams 'x' to node 'c', which takes it in chunks"),
        (
            [Partition("p", (producer(nodes="p q"),)), consumer()],
            "p q c",
            "is fed by both 'p' and 'q'",
        ),
        (
            [
                Partition("p", (producer(),)),
                Partition("q", (producer("u", nodes="q"),)),
                consumer(),
            ],
            "p q c",
            "is fed by both 'p' and 'q' in partition 'q'",
        ),
        (
            [
                Partition("p", (producer(),)),
                consumer(),
                Partition("d", (walk(node("c", "x"), name="u"),), (Stream("c", "x", Fixed(1)),)),
            ],
            "p c",
            "two partitions take the stream 'x' at node 'c'",
        ),
        (
            [
                Partition(
                    "p", (producer(), walk(node("c", "x"), name="v")), (Stream("c", "x", Fixed(1)),)
                )
            ],
            "p c",
            "no other partition declares Stream",
        ),
    ],
)
def test_programs(partitions, nodes, message):
    with pytest.raises(ConfigurationError, match=message):
        WalkProgram(partitions, nodes.split())


def test_two_walks_of_a_partition_may_feed_a_stream():
    feeding = Partition("p", (producer(), producer("u", nodes="q")))
    program = WalkProgram([feeding, consumer()], ["p", "q", "c"])
    assert program.streams_of("p") == (("c", "x"),)
    with pytest.raises(
        ConfigurationError, match="partition 'p' has no walk 'v'; it has .'u', 'w'."
    ):
        program.walk("p", "v")
