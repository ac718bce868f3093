"""A node of a walk whose forward is captured: replays in a loop give what the forward gives."""

from __future__ import annotations

import pytest
import torch

from phalanx.device.cpu import CpuBackend
from phalanx.loop.scheduler import Budget
from phalanx.loop.step_loop import StepLoop
from phalanx.loop.walks import (
    EMIT_TO_CLIENT,
    Edge,
    Loop,
    NextWalk,
    Node,
    Partition,
    WalkGraph,
    WalkModel,
    WalkNode,
    WalkProgram,
    WalkRequest,
)
from phalanx.schema.events import Final
from phalanx.step.engine import StepEngine
from phalanx.step.graphs.capture_config import CaptureConfig
from phalanx.step.graphs.shapes import Shapes
from phalanx.step.outputs import Column, NodeOutputs
from tests.loop.threaded import ThreadedLoop

SIZE = 4
GRAPH = WalkGraph(
    "flow",
    Loop("steps", Node("refine", ("x",), (Edge("refine", "x"), Edge(EMIT_TO_CLIENT, "x"))), 8),
    ("x",),
)


class Refine(WalkNode):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(SIZE, SIZE, generator=generator)
        self.num_forwards = 0

    def can_batch(self, walk, rows, inputs):
        return True

    def preprocess(self, engine, inputs):
        tensors = {"x": torch.stack([given.one("x") for given in inputs])}
        self.request_ids = tuple(row.request_id for row in engine.rows)
        return tensors

    def forward(self, prepared):
        self.num_forwards += 1
        # Elementwise, so that sums do not depend on the number of rows.
        made = (prepared["x"][:, None, :] * self.weight).sum(2).tanh()
        if len(made) == len(self.request_ids):
            return NodeOutputs({"x": Column(self.request_ids, made)})
        return NodeOutputs({"x": Column.by_row(made)})

    def capture_configs(self):
        return (CaptureConfig("flow", Shapes(rows=(1, 2, 4)), caps_eager_batch_size=False),)

    def static_inputs(self, walk, rows, tokens, key):
        self.request_ids = ()
        return {"x": torch.zeros(rows, SIZE)}


class Flow(WalkModel):
    """A request is a start and a number of steps."""

    def first_walks(self, request):
        start, steps = request
        return {"main": NextWalk("flow", {"x": torch.full((SIZE,), start)}, {"steps": steps})}

    def next_walk(self, request, finished):
        return None

    def output(self, request, emitted, *, cancelled):
        return [one.tensor.tolist() for one in emitted]


def outputs(requests, capture: str, kind=StepLoop):
    node = Refine()
    engine = StepEngine(CpuBackend(capture=capture))
    engine.load_model({"refine": node}, [])
    if capture != "off":
        engine.warm_up()
    node.num_forwards = 0
    program = WalkProgram([Partition("main", (GRAPH,))], {"refine"})
    loop = kind(engine, Budget(8, 8))
    for index, request in enumerate(requests):
        loop.start(f"r{index}", WalkRequest(program, Flow(), request))
    ended = {}
    while loop.busy:
        ended |= {event.rid: event.payload for event in loop.tick() if isinstance(event, Final)}
    if isinstance(loop, ThreadedLoop):
        loop.close()
    assert engine.at_rest()
    return [ended[f"r{index}"] for index in range(len(requests))], node.num_forwards


@pytest.mark.parametrize("kind", [StepLoop, ThreadedLoop])
def test_item_8_5_12_captured_steps_of_a_loop_give_what_eager_ones_give(kind):
    requests = [(0.1, 5), (0.7, 3), (-0.4, 8)]
    alone = [outputs([one], "off")[0][0] for one in requests]
    assert [len(one) for one in alone] == [5, 3, 8]
    captured, num_forwards = outputs(requests, "tape", kind)
    assert captured == alone
    assert num_forwards == 0, "every step was replayed"
