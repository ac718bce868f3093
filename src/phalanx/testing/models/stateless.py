"""A node without any resource: a vector goes through it a number of times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.loop.request import Work
from phalanx.step.graphs.capture_config import CaptureConfig
from phalanx.step.graphs.shapes import Shapes
from phalanx.step.outputs import HostRow, NodeOutputs
from phalanx.step.submodule import EngineInputs, NodeSubmodule, StepRow
from phalanx.testing.model_parts import ModelParts
from phalanx.testing.models.parts import (
    Prepared,
    RandomWeights,
    SmallRequest,
    answer,
    tensors_of,
)

STATELESS_NODE = "stateless"
VECTOR_SIZE = 8


class VectorRequest(SmallRequest):
    """A vector and how often it is computed; its output is the last one, as a tuple."""

    def __init__(self, vector: Sequence[float], rounds: int) -> None:
        self._first = tuple(vector)
        self.vector = self._first
        self._rounds = rounds
        self._done = 0

    def next_work(self) -> Work | None:
        return Work(STATELESS_NODE, "round", 1, 1) if self._done < self._rounds else None

    def advance(self, span: int) -> None:
        self._done += span

    def push_back(self) -> None:
        """Nothing is held anywhere else, so nothing is lost."""

    def accept(self, outputs: HostRow) -> None:
        self.vector = tuple(outputs["vector"])

    def output(self, *, cancelled: bool) -> tuple[float, ...]:
        return self.vector


class Stateless(NodeSubmodule):
    """See the module. A row's state is a `VectorRequest`."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        weights = RandomWeights(seed)
        self._weight = weights.take(VECTOR_SIZE, VECTOR_SIZE)
        self._bias = weights.take(VECTOR_SIZE)

    def prepare_inputs(self, walk: str, row: StepRow) -> tuple[float, ...]:
        return _state(row).vector

    def can_batch(self, walk: str, rows: Sequence[StepRow], inputs: Sequence[Any]) -> bool:
        return True

    def preprocess(self, engine: EngineInputs, inputs: Sequence[Any]) -> Any:  # noqa: ANN401
        tensors = {"vectors": torch.tensor(inputs, dtype=torch.float32)}
        if engine.lease is not None:
            return tensors
        return Prepared(tensors, tuple(row.request_id for row in engine.rows), {})

    def forward(self, prepared: Prepared | Mapping[str, Tensor]) -> NodeOutputs:
        vectors = tensors_of(prepared)["vectors"]
        return answer(prepared, {"vector": torch.tanh(vectors @ self._weight.T + self._bias)})

    def capture_configs(self) -> Sequence[CaptureConfig]:
        return (CaptureConfig("round", Shapes(rows=(1, 2, 4)), caps_eager_batch_size=False),)

    def static_inputs(self, walk: str, rows: int, tokens: int, key: object) -> dict[str, Tensor]:
        return {"vectors": torch.zeros(rows, VECTOR_SIZE)}

    def check_stop(self, row: StepRow, outputs: HostRow) -> frozenset[str]:
        _state(row).accept(outputs)
        return frozenset()


def _state(row: StepRow) -> VectorRequest:
    assert isinstance(row.info.state, VectorRequest)
    return row.info.state


def stateless_parts(seed: int = 0) -> ModelParts:
    """The model of one `Stateless` node."""
    return ModelParts({STATELESS_NODE: Stateless(seed)}, ())
