"""One request through small walks: loops, branches, what persists, what ends, what goes wrong."""

from __future__ import annotations

import pytest
import torch

from phalanx.errors import ConfigurationError, RequestFailedError
from phalanx.loop.walks import (
    Edge,
    Loop,
    NextWalk,
    Node,
    Parallel,
    Partition,
    Sequential,
    WalkGraph,
    WalkRequest,
)
from phalanx.step.outputs import Column, NodeOutputs
from tests.loop.walks.number_nodes import (
    NumberModel,
    NumberNode,
    Numbers,
    Once,
    Run,
    emit,
    keep,
    number,
    outcome,
)


def run_of(section, inputs=(), model=None, ends=(), stateless=()) -> Run:
    graph = WalkGraph("w", section, tuple(inputs))
    nodes = {
        name: NumberNode(
            name, ident, place.node.outputs, dict(ends).get(name, ""), name not in stateless
        )
        for ident, (name, place) in enumerate(graph.routes.places.items())
    }
    return Run([Partition("p", (graph,))], nodes, model or Once())


def test_a_sequence_hands_on_its_outputs():
    a = Node("a", ("x",), (Edge("b", "y"), emit("y")))
    b = Node("b", ("y",), (emit("z"),))
    run = run_of(Sequential((a, b)), ["x"])
    y = number(0, 0, [[5]])
    assert outcome(run, Numbers({"x": 5})) == {"y": [y], "z": [number(1, 0, [[y]])]}


def test_a_sequence_waits_also_where_no_edge_leads():
    a, b, c = (Node(name, (), (emit("n"),)) for name in "abc")
    run = run_of(Sequential((a, Parallel((b, c)))), model=Once())
    assert outcome(run, Numbers({}))["n"] == [number(i, 0, []) for i in range(3)]


def test_a_loop_feeds_back_and_has_what_comes_from_outside_in_each_iteration():
    a = Node("a", ("back", "x"), (Edge("a", "back"), emit("n")))
    run = run_of(Loop("l", a, 3), ["back", "x"], stateless="a")
    back, expected = 1, []
    for _ in range(3):
        back = number(0, 0, [[back], [7]])
        expected.append(back)
    assert outcome(run, Numbers({"back": 1, "x": 7})) == {"n": expected}


def test_an_inner_loop_begins_anew_with_each_outer_iteration():
    a = Node("a", ("x",), (Edge("a", "x"), emit("n")))
    run = run_of(Loop("l", Loop("m", a, 2), 2), ["x"], stateless="a")
    first = number(0, 0, [[3]])
    assert outcome(run, Numbers({"x": 3})) == {"n": [first, number(0, 0, [[first]])] * 2}


def test_the_last_and_all_values_leave_a_loop():
    a = Node("a", (), (Edge("b", "last"), Edge("b", "all"), keep("all"), keep("newest")))
    b = Node("b", ("last", "all"), (emit("n"),))
    loop = Loop("l", a, 3, ("last",), ("all",))
    request = Numbers({})
    run = run_of(Sequential((loop, b)))
    output = outcome(run, request)
    values, tally = [], 0
    for _ in range(3):
        values.append(number(0, tally, []))
        tally = (tally * 31 + values[-1]) % 65521
    # Inputs in the order of their names.
    assert output == {"n": [number(1, 0, [values, values[-1:]])]}
    assert request.kept == [{"all": tuple(values), "newest": (values[-1],)}]


def test_all_values_of_nested_loops_are_joined():
    a = Node("a", (), (Edge("b", "all"),))
    inner = Loop("m", a, 2, accumulated_outputs=("all",))
    outer = Loop("l", inner, 2, accumulated_outputs=("all",))
    b = Node("b", ("all",), (emit("n"),))
    run = run_of(Sequential((outer, b)), stateless="a")
    assert outcome(run, Numbers({}))["n"] == [number(1, 0, [[number(0, 0, [])] * 4])]


def test_a_branch_sees_the_other_one_only_in_the_next_iteration():
    a = Node("a", ("fromb",), (Edge("b", "froma"), emit("a")))
    b = Node("b", ("froma",), (Edge("a", "fromb"), emit("b")))
    run = run_of(Loop("l", Parallel((a, b)), 2), ["froma", "fromb"], stateless="ab")
    first_a, first_b = number(0, 0, [[1]]), number(1, 0, [[1]])
    assert outcome(run, Numbers({"froma": 1, "fromb": 1})) == {
        "a": [first_a, number(0, 0, [[first_b]])],
        "b": [first_b, number(1, 0, [[first_a]])],
    }


def test_branches_take_turns():
    a, b = (Node(name, (), (emit("n"),)) for name in "ab")
    run = run_of(Parallel((Loop("l", a, 3), Loop("m", b, 2))), stateless="ab")
    order = outcome(run, Numbers({}))["n"]
    of_a, of_b = number(0, 0, []), number(1, 0, [])
    assert order == [of_a, of_b, of_a, of_b, of_a]


def test_a_node_ends_a_loop_and_the_iteration_is_finished():
    class Ends(NumberNode):
        def ended_loops(self, inputs, outputs):
            return frozenset({"l"} if inputs.iterations["l"] == 1 else ())

    a = Node("a", (), (Edge("b", "y"),))
    b = Node("b", ("y",), (emit("n"),))
    graph = WalkGraph("w", Loop("l", Sequential((a, b)), 9))
    nodes = {"a": Ends("a", 0, a.outputs), "b": NumberNode("b", 1, b.outputs)}
    run = Run([Partition("p", (graph,))], nodes, Once())
    request = Numbers({})
    assert len(outcome(run, request)["n"]) == 2
    assert request.finished.stopped == {"l"}
    assert request.finished.walk == "w"


def test_a_request_may_bound_a_loop_further():
    a = Node("a", (), (emit("n"),))
    run = run_of(Loop("l", a, 9))
    assert len(outcome(run, Numbers({}, iterations={"l": 4}))["n"]) == 4
    run.start("r", Numbers({}, iterations={"l": 10}))
    run.finish()
    with pytest.raises(ConfigurationError, match="10 iterations of loop 'l'; its loops and"):
        run.output("r")


def test_what_persists_survives_the_walk():
    a = Node("a", ("x",), (keep("k"), emit("n")))
    request = Numbers({"x": 2})
    run = run_of(a, ["x"], NumberModel(), stateless="a")
    first = number(0, 0, [[2]])
    second = number(0, 0, [[2 + first]])
    assert outcome(run, request) == {"n": [first, second]}
    assert request.kept == [{"k": (first,)}, {"k": (second,)}]


@pytest.mark.parametrize(
    ("walk", "error", "message"),
    [
        (NextWalk("v"), ConfigurationError, "partition 'p' has no walk 'v'; it has .'w'."),
        (NextWalk("w"), ConfigurationError, "walk 'w' begins with the inputs .*; it takes .'x'."),
        (
            NextWalk("w", {"x": torch.tensor(1)}, {"m": 1}),
            ConfigurationError,
            "1 iterations of loop 'm'",
        ),
    ],
)
def test_a_walk_that_cannot_begin_ends_the_request(walk, error, message):
    class Wrong(Once):
        def first_walks(self, request):
            return {"p": walk}

    run = run_of(Node("a", ("x",)), ["x"], Wrong())
    run.start("r", Numbers({}))
    run.finish()
    with pytest.raises(error, match=message):
        run.output("r")


def test_a_run_of_no_tokens_ends_the_request():
    class Wrong(Once):
        def num_tokens(self, request, node, inputs):
            return 0

    run = run_of(Node("a"), model=Wrong())
    run.start("r", Numbers({}))
    run.finish()
    with pytest.raises(ConfigurationError, match="num_tokens gives 0 for node 'a'"):
        run.output("r")


def test_an_unknown_partition_ends_the_request():
    class Wrong(Once):
        def first_walks(self, request):
            return {"q": NextWalk("w")}

    run = run_of(Node("a"), model=Wrong())
    run.start("r", Numbers({}))
    run.finish()
    with pytest.raises(ConfigurationError, match="first_walks names partition 'q'; there are"):
        run.output("r")


def test_no_walk_at_all_is_an_empty_output():
    class Nothing(Once):
        def first_walks(self, request):
            return {}

    assert outcome(run_of(Node("a"), model=Nothing()), Numbers({})) == {}


def one_node_run(node: NumberNode, *outputs: Edge, loop: str = "l") -> Run:
    inputs = tuple(edge.name for edge in outputs if edge.leads_to_a_node)
    graph = WalkGraph("w", Loop(loop, Node("a", inputs, outputs), 2), inputs)
    return Run([Partition("p", (graph,))], {"a": node}, Once())


def test_an_output_that_a_node_owes_is_missed():
    class Forgets(NumberNode):
        def forward(self, prepared):
            made = super().forward(prepared)
            return NodeOutputs({"number": made.columns["number"]})

    run = one_node_run(Forgets("a", 0, ()), Edge("a", "x"), emit("y"))
    run.start("r", Numbers({"x": 1}))
    run.finish()
    with pytest.raises(RequestFailedError, match="gave no 'x' for 'a'; it gave .'number'."):
        run.output("r")


def test_an_output_for_a_client_may_be_missing():
    class Forgets(NumberNode):
        def forward(self, prepared):
            made = super().forward(prepared)
            return NodeOutputs({"number": made.columns["number"]})

    run = one_node_run(Forgets("a", 0, ()), emit("y"), keep("z"))
    assert outcome(run, Numbers({})) == {}


def test_the_end_of_an_unknown_loop_fails():
    assert number(2, 0, []) % 5 == 0, "the node ends its loop then"
    run = one_node_run(NumberNode("a", 2, (), ends="m"))
    run.start("r", Numbers({}))
    run.finish()
    with pytest.raises(ConfigurationError, match="ends loop 'm'; the loops around it are .'l'."):
        run.output("r")


def test_a_node_that_is_no_walk_node_is_named():
    from phalanx.step.submodule import NodeSubmodule

    class Plain(NodeSubmodule):
        def forward(self, prepared):
            return NodeOutputs()

    graph = WalkGraph("w", Node("a"))
    nodes = {"a": NumberNode("a", 0, (), stateful=False)}
    run = Run([Partition("p", (graph,))], nodes, Once())
    run.engine.load_model({"a": Plain()}, [])
    run.start("r", Numbers({}))
    run.finish()
    with pytest.raises(ConfigurationError, match="node 'a' did not hand over what it computed"):
        run.output("r")


def test_tokens_found_in_a_cache_are_not_computed():
    """Those of the present run, and after a push-back those of the runs that come first."""
    node = NumberNode("a", 0, ())
    graph = WalkGraph(
        "w", Loop("l", Node("a", ("x",), (Edge("a", "x"),), divisible=True), 3), ("x",)
    )
    run = Run([Partition("p", (graph,))], {"a": node}, Once())

    class Long(Once):
        def num_tokens(self, request, node, inputs):
            return 5

    state = WalkRequest(run.program, Long(), Numbers({"x": 1}))
    work = state.next_work()
    assert (work.remaining, work.total) == (5, 5)
    state.adopt(2)
    work = state.next_work()
    assert (work.remaining, work.total) == (3, 5)
    assert state.inputs().start == 2
    for _ in range(2):
        state.advance(state.next_work().remaining)
        outputs = NodeOutputs({"x": Column(("r",), torch.tensor([7]))})
        state.take("r", [outputs])
        state.finish(frozenset())
    state.push_back()
    state.next_work()
    state.adopt(5 + 2)
    work = state.next_work()
    assert (work.remaining, work.total) == (3, 10)
    assert state.inputs().one("x") == 7
    assert state.completed() is None
    state.advance(3)
    state.finish(frozenset())
    work = state.next_work()
    assert (work.remaining, work.total) == (5, 15)
    state.advance(5)
    assert state.completed().one("x") == 7
