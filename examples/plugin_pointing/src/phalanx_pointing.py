"""A robot policy of two nodes: one looks at points, the other moves a hand to their middle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from phalanx import BatchingEntry, EntryArgs, InvalidRequestError, get_engine_config
from phalanx.device import create_backend
from phalanx.loop.scheduler import Budget
from phalanx.loop.step_loop import StepLoop
from phalanx.loop.walks import (
    EMIT_TO_CLIENT,
    Edge,
    Emitted,
    FinishedWalk,
    Loop,
    NextWalk,
    Node,
    Partition,
    Sequential,
    WalkGraph,
    WalkInputs,
    WalkModel,
    WalkNode,
    WalkProgram,
    WalkRequest,
)
from phalanx.schema.events import Event
from phalanx.schema.limits import Limits
from phalanx.step.engine import StepEngine
from phalanx.step.outputs import Column, HostRow, NodeOutputs
from phalanx.step.submodule import EngineInputs, StepRow


@dataclass(frozen=True)
class PointingArgs(EntryArgs):
    """`gain` is the share of the way that a move takes; `max_batch_size` requests run at once."""

    gain: float = 0.5
    max_batch_size: int = 16


class PointingRequest(msgspec.Struct, frozen=True):
    """Points to look at and where the hand is, in metres; it stops within `tolerance`."""

    points: list[tuple[float, float]]
    hand: tuple[float, float]
    tolerance: float = 0.01


class PointingOutput(msgspec.Struct, frozen=True):
    """Where the hand goes, move by move."""

    path: list[list[float]]

    def merged(self, later: PointingOutput) -> PointingOutput:
        return PointingOutput(self.path + later.path)


Prepared = tuple[tuple[str, ...], Tensor, Tensor]


class Look(WalkNode):
    """Points of any number -> their middle. A learned model would have its encoder here."""

    def can_batch(self, walk: str, rows: Sequence[StepRow], inputs: Sequence[WalkInputs]) -> bool:
        return True

    def preprocess(self, engine: EngineInputs, inputs: Sequence[WalkInputs]) -> Prepared:
        points = [given.one("points") for given in inputs]
        counts = torch.tensor([len(one) for one in points], device=points[0].device)
        return _ids(engine), pad_sequence(points, batch_first=True), counts

    def forward(self, prepared: Prepared) -> NodeOutputs:
        request_ids, points, counts = prepared
        return NodeOutputs({"target": Column(request_ids, points.sum(1) / counts[:, None])})


class Move(WalkNode):
    """One move towards the target, which ends the loop when it is near enough."""

    read_on_host = frozenset({"error"})

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def can_batch(self, walk: str, rows: Sequence[StepRow], inputs: Sequence[WalkInputs]) -> bool:
        return True

    def preprocess(self, engine: EngineInputs, inputs: Sequence[WalkInputs]) -> Prepared:
        hands = torch.stack([given.one("hand") for given in inputs])
        return _ids(engine), hands, torch.stack([given.one("target") for given in inputs])

    def forward(self, prepared: Prepared) -> NodeOutputs:
        request_ids, hands, targets = prepared
        moved = hands + self.gain * (targets - hands)
        error = (targets - moved).norm(dim=1)
        outputs = {"hand": moved, "error": error}
        return NodeOutputs({name: Column(request_ids, outputs[name]) for name in outputs})

    def ended_loops(self, inputs: WalkInputs, outputs: HostRow) -> frozenset[str]:
        near = outputs["error"] <= inputs.request.tolerance
        return frozenset({"approach"} if near else ())


def _ids(engine: EngineInputs) -> tuple[str, ...]:
    return tuple(row.request_id for row in engine.rows)


LOOK = Node("look", inputs=("points",), outputs=(Edge("move", "target"),))
MOVE = Node(
    "move",
    inputs=("hand", "target"),
    outputs=(Edge("move", "hand"), Edge(EMIT_TO_CLIENT, "hand", modality="pose")),
)
POINT = WalkGraph(
    "point",
    Sequential((LOOK, Loop("approach", MOVE, max_iterations=64))),
    inputs=("points", "hand"),
)


class PointingModel(WalkModel):
    """Every request is one walk; what it emits is the path."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def first_walks(self, request: PointingRequest) -> Mapping[str, NextWalk]:
        inputs = {
            "points": torch.tensor(request.points, device=self._device),
            "hand": torch.tensor(request.hand, device=self._device),
        }
        return {"main": NextWalk("point", inputs)}

    def next_walk(self, request: PointingRequest, finished: FinishedWalk) -> NextWalk | None:
        return None

    def take_delta(self, request: PointingRequest, emitted: Sequence[Emitted]) -> PointingOutput:
        return PointingOutput([one.tensor.tolist() for one in emitted])

    def output(
        self, request: PointingRequest, emitted: Sequence[Emitted], *, cancelled: bool
    ) -> PointingOutput:
        return PointingOutput([one.tensor.tolist() for one in emitted])


class Pointing(BatchingEntry):
    """What Phalanx finds by the entry point."""

    name = "pointing"
    args_cls = PointingArgs
    request_cls = PointingRequest
    output_cls = PointingOutput

    @staticmethod
    def validate(request: PointingRequest, limits: Limits) -> None:
        if not request.points:
            raise InvalidRequestError("points is empty; give at least one", field="points")

    def setup(self, args: PointingArgs) -> None:
        backend = create_backend(get_engine_config().device.target)
        nodes = {"look": Look(), "move": Move(args.gain)}
        engine = StepEngine(backend)
        engine.load_model(nodes, specs=[])
        self._program = WalkProgram([Partition("main", (POINT,))], nodes)
        self._model = PointingModel(backend.device)
        budget = Budget(max_step_tokens=args.max_batch_size, max_running=args.max_batch_size)
        self._loop = StepLoop(engine, budget)

    def start(self, rid: str, request: PointingRequest) -> None:
        self._loop.start(rid, WalkRequest(self._program, self._model, request))

    def cancel(self, rid: str) -> None:
        self._loop.cancel(rid)

    def tick(self) -> Sequence[Event]:
        return self._loop.tick()

    @property
    def busy(self) -> bool:
        return self._loop.busy
