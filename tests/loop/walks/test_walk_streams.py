"""Streams between the partitions of one request: how they end, and what waits for ever."""

from __future__ import annotations

import pytest
import torch

from phalanx.errors import RequestFailedError
from phalanx.loop.walks import Edge, Fixed, Loop, NextWalk, Node, Partition, Stream, WalkGraph
from phalanx.schema.events import Failed
from phalanx.step.outputs import Column, NodeOutputs
from tests.loop.walks.number_nodes import NumberNode, Numbers, Once, Run, emit, outcome


def test_a_partition_that_waits_for_ever_is_told_of():
    """Two partitions that wait for each other, and one that wants more than the final chunk."""
    ping = Node("a", ("y",), (Edge("b", "x", streaming=True),))
    pong = Node("b", ("x",), (Edge("a", "y", streaming=True),))
    partitions = [
        Partition("p", (WalkGraph("w", ping),), (Stream("a", "y", Fixed(1)),)),
        Partition("q", (WalkGraph("v", pong),), (Stream("b", "x", Fixed(1)),)),
    ]
    nodes = {name: NumberNode(name, 0, (), stateful=False) for name in "ab"}

    class Both(Once):
        first = {"p": NextWalk("w"), "q": NextWalk("v")}

        def first_walks(self, request):
            return self.first

    run = Run(partitions, nodes, Both())
    run.start("r", Numbers({}))
    run.finish()
    with pytest.raises(RequestFailedError, match="waits at node 'a' for stream 'y': partition 'q'"):
        run.output("r")

    class Greedy(Both):
        first = {"q": NextWalk("v")}

        def next_walk(self, request, finished):
            return NextWalk("v")

    run = Run(partitions, nodes, Greedy())
    run.start("r", Numbers({}))
    run.finish()
    assert isinstance(run.ended["r"], Failed)
    with pytest.raises(RequestFailedError, match="stream 'x': its final chunk was taken"):
        run.output("r")


def streaming_run(policy, model, produced: int = 3) -> Run:
    """A producer of `produced` numbers, and a consumer that emits the number of items it gets."""

    class Counts(NumberNode):
        def forward(self, prepared):
            rids, inputs = prepared
            counts = torch.tensor([len(given.tensors["x"]) for given in inputs])
            column = Column(tuple(rids), counts)
            return NodeOutputs({"number": column, "count": column})

    producer = Node("p", (), (Edge("c", "x", streaming=True),))
    consumer = Node("c", ("x",), (emit("count"),))
    partitions = [
        Partition("p", (WalkGraph("w", Loop("l", producer, produced)),)),
        Partition("q", (WalkGraph("v", consumer),), (Stream("c", "x", policy),)),
    ]
    nodes = {
        "p": NumberNode("p", 0, producer.outputs, stateful=False),
        "c": Counts("c", 1, consumer.outputs, stateful=False),
    }
    return Run(partitions, nodes, model)


class Consuming(Once):
    """The consumer goes on for `most` walks, or until its stream ends."""

    def __init__(self, most: int) -> None:
        self.most = most

    def first_walks(self, request):
        return {"p": NextWalk("w"), "q": NextWalk("v")}

    def next_walk(self, request, finished):
        if finished.walk == "v":
            request.kept.append({})
        goes_on = finished.walk == "v" and len(request.kept) < self.most
        return NextWalk("v") if goes_on and not finished.ended_streams else None


def test_item_8_5_10_the_model_ends_a_stream_that_continues():
    run = streaming_run(Fixed(2, continue_after_done=True), Consuming(5))
    assert outcome(run, Numbers({})) == {"count": [2, 1, 0, 0, 0]}


def test_a_consumer_that_is_done_leaves_the_rest_of_its_stream():
    run = streaming_run(Fixed(1), Consuming(1), produced=4)
    assert outcome(run, Numbers({})) == {"count": [1]}
    assert len(run.nodes["p"].batch_sizes) == 4


def test_a_partition_that_takes_no_part_ends_its_streams():
    class OnlyConsumer(Consuming):
        def first_walks(self, request):
            return {"q": NextWalk("v")}

    run = streaming_run(Fixed(2), OnlyConsumer(9))
    assert outcome(run, Numbers({})) == {"count": [0]}
