"""A language model without a cache: a convolution and a recurrence, both with state of fixed size."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.step.declaration import Segment, SubmoduleStep
from phalanx.step.graphs.capture_config import CaptureConfig
from phalanx.step.graphs.shapes import Shapes
from phalanx.step.outputs import HostRow, NodeOutputs
from phalanx.step.resources.base import Resource
from phalanx.step.resources.recurrent_state import (
    LayerState,
    RecurrentState,
    RecurrentStateSpec,
    StateBlock,
    StateStep,
)
from phalanx.step.submodule import EngineInputs, NodeSubmodule, StepRow
from phalanx.testing.model_parts import ModelParts
from phalanx.testing.models.parts import (
    VOCAB_SIZE,
    Prepared,
    RandomWeights,
    answer,
    tensors_of,
)
from phalanx.testing.token_request import TokenRequest

RECURRENT_PLACE = ("recurrent", "generate")
"""(node, walk) of a `TokenRequest` for this model."""
NUM_LAYERS = 2
STATE_WIDTH = 16
WINDOW = 3
_ALL_GIVE = "all rows give a token"


class _Layer:
    """`y = conv(x); h = decay * h + (1 - decay) * tanh(y); x + h @ out`, token by token."""

    def __init__(self, weights: RandomWeights) -> None:
        self._kernel = weights.take(WINDOW, STATE_WIDTH)
        self._decay = weights.take(STATE_WIDTH).sigmoid()
        self._out = weights.take(STATE_WIDTH, STATE_WIDTH)

    def run(self, x: Tensor, real: Tensor, state: LayerState) -> Tensor:
        """`x` [rows, tokens, width], of which those are computed that `real` [rows, tokens] names."""
        window, h = state.read("convolution"), state.read("recurrent")
        computed: list[Tensor] = []
        for at in range(x.shape[1]):
            here = real[:, at, None]
            seen = torch.cat((window, x[:, at, None]), dim=1)
            moved = (seen * self._kernel).sum(1).tanh()
            h = torch.where(here, self._decay * h + (1 - self._decay) * moved, h)
            window = torch.where(here[..., None], seen[:, 1:], window)
            computed.append(x[:, at] + h @ self._out.T)
        state.write("convolution", window)
        state.write("recurrent", h)
        return torch.stack(computed, dim=1)


class Recurrent(NodeSubmodule):
    """See the module. A row's state is a `TokenRequest`; each token is the likeliest, and comes with
    its `logits`, float32 [vocabulary].
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        weights = RandomWeights(seed)
        self._embedding = weights.embedding(VOCAB_SIZE, STATE_WIDTH)
        self._layers = [_Layer(weights) for _ in range(NUM_LAYERS)]
        self._head = weights.take(VOCAB_SIZE, STATE_WIDTH)
        self._memory: RecurrentState

    def bind_node_resources(self, resources: Mapping[str, Resource]) -> None:
        memory = resources["memory"]
        assert isinstance(memory, RecurrentState)
        self._memory = memory

    def prepare_inputs(self, walk: str, row: StepRow) -> list[int]:
        return _state(row).tokens(row.span)

    def can_batch(self, walk: str, rows: Sequence[StepRow], inputs: Sequence[Any]) -> bool:
        return True

    def declare_step(
        self, walk: str, rows: Sequence[StepRow], inputs: Sequence[Any]
    ) -> SubmoduleStep:
        segments = tuple(Segment(row.request_id, row.span) for row in rows)
        return SubmoduleStep(
            segments, {"memory": StateStep(segments)}, self.capture_key(walk, rows)
        )

    def preprocess(self, engine: EngineInputs, inputs: Sequence[Any]) -> Any:  # noqa: ANN401
        longest = max(len(given) for given in inputs)
        padded = [[*given, *[0] * (longest - len(given))] for given in inputs]
        spans = torch.tensor([len(given) for given in inputs])
        tensors = {
            "token_ids": torch.tensor(padded),
            "real": torch.arange(longest) < spans[:, None],
        }
        if engine.lease is not None:
            return tensors
        giving = [at for at, row in enumerate(engine.rows) if _state(row).gives_token(row.span)]
        names = tuple(engine.rows[at].request_id for at in giving)
        tensors["giving"] = torch.tensor(giving, dtype=torch.int64)
        tensors["last"] = spans[tensors["giving"]] - 1
        rids = tuple(row.request_id for row in engine.rows)
        return Prepared(tensors, rids, {"token": names, "logits": names})

    def forward(self, prepared: Prepared | Mapping[str, Tensor]) -> NodeOutputs:
        given = tensors_of(prepared)
        x = self._embedding[given["token_ids"]]
        for layer in self._layers:
            x = layer.run(x, given["real"], self._memory.next_layer())
        last = x[given["giving"], given["last"]] if "giving" in given else x[:, -1]
        logits = last @ self._head.T
        return answer(prepared, {"token": logits.argmax(-1), "logits": logits})

    def capture_configs(self) -> Sequence[CaptureConfig]:
        shapes = Shapes(rows=(1, 2, 4))
        return (
            CaptureConfig(RECURRENT_PLACE[1], shapes, key=_ALL_GIVE, caps_eager_batch_size=False),
        )

    def capture_key(self, walk: str, rows: Sequence[StepRow]) -> Hashable:
        giving = all(row.span == 1 and _state(row).gives_token(1) for row in rows)
        return _ALL_GIVE if giving else None

    def static_inputs(self, walk: str, rows: int, tokens: int, key: Hashable) -> dict[str, Tensor]:
        return {
            "token_ids": torch.zeros(rows, 1, dtype=torch.int64),
            "real": torch.ones(rows, 1, dtype=torch.bool),
        }

    def check_stop(self, row: StepRow, outputs: HostRow) -> frozenset[str]:
        _state(row).accept(outputs)
        return frozenset()


def _state(row: StepRow) -> TokenRequest:
    assert isinstance(row.info.state, TokenRequest)
    return row.info.state


def recurrent_parts(max_slots: int, num_host_slots: int = 0, seed: int = 0) -> ModelParts:
    """The model of one `Recurrent` node, with state for so many requests."""
    blocks = {
        "convolution": StateBlock((WINDOW - 1, STATE_WIDTH)),
        "recurrent": StateBlock((STATE_WIDTH,)),
    }
    nodes = frozenset({RECURRENT_PLACE[0]})
    spec = RecurrentStateSpec("memory", nodes, blocks, NUM_LAYERS, max_slots, num_host_slots)
    return ModelParts({RECURRENT_PLACE[0]: Recurrent(seed)}, (spec,))
