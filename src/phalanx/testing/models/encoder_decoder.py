"""An encoder that writes a context once, and a decoder that reads it with every token."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.device.operators.torch_operators import TorchOperators
from phalanx.loop.request import Work
from phalanx.step.declaration import Segment, SubmoduleStep
from phalanx.step.graphs.capture_config import CaptureConfig
from phalanx.step.graphs.shapes import Shapes
from phalanx.step.outputs import HostRow, NodeOutputs
from phalanx.step.resources.attention import AttentionSpec, AttentionStep, PagedAttention
from phalanx.step.resources.base import Resource
from phalanx.step.resources.cross_attention import (
    CONTEXT_LABEL,
    CrossAttention,
    CrossAttentionSpec,
    CrossAttentionStep,
)
from phalanx.step.resources.kv_cache import KVSpec, KVStep
from phalanx.step.resources.positions import PositionSpec, PositionStep
from phalanx.step.resources.ragged_attention import (
    RaggedAttention,
    RaggedAttentionSpec,
    RaggedStep,
)
from phalanx.step.submodule import EngineInputs, NodeSubmodule, StepRow
from phalanx.testing.model_parts import ModelParts
from phalanx.testing.models.parts import (
    HEADS,
    VOCAB_SIZE,
    WIDTH,
    Block,
    Prepared,
    RandomWeights,
    SmallRequest,
    answer,
    kv_config,
    rotary_tables,
    tensors_of,
)

ENCODER, DECODER = "encoder", "decoder"
NUM_LAYERS = 2
_START = 0
_KEYS = HEADS.num_kv_heads * HEADS.head_dim
_ALL_GIVE = "all rows give a token"


class TranslateRequest(SmallRequest):
    """Tokens to encode, of which there may be none, and how many to decode: the output. `logits` are
    what each was chosen from.
    """

    def __init__(self, source: Sequence[int], count: int) -> None:
        self.source = tuple(source)
        self.outputs: list[int] = []
        self.logits: list[list[float]] = []
        self._count = count
        self._encoded = not source
        self._computed = 0

    @property
    def encoded(self) -> bool:
        """Whether the context has been written."""
        return self._encoded

    def next_work(self) -> Work | None:
        if len(self.outputs) >= self._count:
            return None
        if not self._encoded:
            return Work(ENCODER, "encode", len(self.source), len(self.source), divisible=False)
        total = 1 + len(self.outputs)
        return Work(DECODER, "decode", total - self._computed, total)

    def tokens(self, span: int) -> list[int]:
        """The decoder's next tokens to compute."""
        return [_START, *self.outputs][self._computed : self._computed + span]

    def gives_token(self, span: int) -> bool:
        return self._computed + span == 1 + len(self.outputs)

    def advance(self, span: int) -> None:
        if self._encoded:
            self._computed += span
        else:
            self._encoded = True

    def push_back(self) -> None:
        self._encoded, self._computed = not self.source, 0

    def accept(self, outputs: HostRow) -> None:
        if "token" in outputs:
            self.outputs.append(outputs["token"])
            self.logits.append(outputs["logits"])

    def output(self, *, cancelled: bool) -> tuple[int, ...]:
        return tuple(self.outputs)


class Encoder(NodeSubmodule):
    """Two-way attention within each source, then keys and values of the context for every layer of
    the decoder. A row's state is a `TranslateRequest`.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        weights = RandomWeights(seed)
        self._embedding = weights.embedding(VOCAB_SIZE, WIDTH)
        self._qkv = weights.take(3 * WIDTH, WIDTH)
        self._out = weights.take(WIDTH, WIDTH)
        self._contexts = [weights.take(2 * _KEYS, WIDTH) for _ in range(NUM_LAYERS)]
        self._ragged: RaggedAttention
        self._cross: CrossAttention

    def bind_node_resources(self, resources: Mapping[str, Resource]) -> None:
        ragged, cross = resources["ragged"], resources["cross"]
        assert isinstance(ragged, RaggedAttention)
        assert isinstance(cross, CrossAttention)
        self._ragged, self._cross = ragged, cross

    def prepare_inputs(self, walk: str, row: StepRow) -> tuple[int, ...]:
        return _state(row).source

    def can_batch(self, walk: str, rows: Sequence[StepRow], inputs: Sequence[Any]) -> bool:
        return True

    def declare_step(
        self, walk: str, rows: Sequence[StepRow], inputs: Sequence[Any]
    ) -> SubmoduleStep:
        segments = tuple(Segment(row.request_id, row.span) for row in rows)
        contexts = tuple(Segment(row.request_id, row.span, CONTEXT_LABEL) for row in rows)
        return SubmoduleStep(
            segments,
            {
                "ragged": RaggedStep(segments),
                "context": KVStep(contexts),
                "cross": CrossAttentionStep(),
            },
        )

    def preprocess(self, engine: EngineInputs, inputs: Sequence[Any]) -> Tensor:
        return torch.tensor([token for given in inputs for token in given])

    def forward(self, prepared: Tensor) -> NodeOutputs:
        x = self._embedding[prepared]
        x = x + torch.sin(x.cumsum(-1))
        q, k, v = (x @ self._qkv.T).view(len(x), 3, HEADS.num_heads, HEADS.head_dim).unbind(1)
        x = x + self._ragged.attend(q, k, v) @ self._out.T
        for weight in self._contexts:
            keys, values = (x @ weight.T).view(len(x), 2, HEADS.num_kv_heads, -1).unbind(1)
            self._cross.write(keys, values)
        return NodeOutputs()


class Decoder(NodeSubmodule):
    """Attention to oneself and to the context. A row's state is a `TranslateRequest`; each token is
    the likeliest, and comes with its `logits`, float32 [vocabulary].
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        weights = RandomWeights(seed)
        operators = TorchOperators()
        self._embedding = weights.embedding(VOCAB_SIZE, WIDTH)
        self._blocks = [Block(weights, operators) for _ in range(NUM_LAYERS)]
        self._ask = [weights.take(WIDTH, WIDTH) for _ in range(NUM_LAYERS)]
        self._hear = [weights.take(WIDTH, WIDTH) for _ in range(NUM_LAYERS)]
        self._head = weights.take(VOCAB_SIZE, WIDTH)
        self._attention: PagedAttention
        self._cross: CrossAttention

    def bind_node_resources(self, resources: Mapping[str, Resource]) -> None:
        attention, cross = resources["attention"], resources["cross"]
        assert isinstance(attention, PagedAttention)
        assert isinstance(cross, CrossAttention)
        self._attention, self._cross = attention, cross

    def prepare_inputs(self, walk: str, row: StepRow) -> list[int]:
        return _state(row).tokens(row.span)

    def can_batch(self, walk: str, rows: Sequence[StepRow], inputs: Sequence[Any]) -> bool:
        return True

    def declare_step(
        self, walk: str, rows: Sequence[StepRow], inputs: Sequence[Any]
    ) -> SubmoduleStep:
        segments = tuple(Segment(row.request_id, row.span) for row in rows)
        contexts = tuple(Segment(row.request_id, 0, CONTEXT_LABEL) for row in rows)
        return SubmoduleStep(
            segments,
            {
                "kv": KVStep(segments),
                "attention": AttentionStep(),
                "positions": PositionStep(segments),
                "context": KVStep(contexts, labels=(CONTEXT_LABEL,)),
                "cross": CrossAttentionStep(segments),
            },
            self.capture_key(walk, rows),
        )

    def preprocess(self, engine: EngineInputs, inputs: Sequence[Any]) -> Any:  # noqa: ANN401
        tensors = {
            "token_ids": torch.tensor([token for given in inputs for token in given]),
            "positions": engine.plans["positions"],
        }
        if engine.lease is not None:
            return tensors
        ends = torch.tensor([row.span for row in engine.rows]).cumsum(0) - 1
        giving = [at for at, row in enumerate(engine.rows) if _state(row).gives_token(row.span)]
        names = tuple(engine.rows[at].request_id for at in giving)
        tensors["giving"] = ends[torch.tensor(giving, dtype=torch.int64)]
        return Prepared(
            tensors, tuple(row.request_id for row in engine.rows), {"token": names, "logits": names}
        )

    def forward(self, prepared: Prepared | Mapping[str, Tensor]) -> NodeOutputs:
        given = tensors_of(prepared)
        rotary = rotary_tables(given["positions"])
        x = self._embedding[given["token_ids"]]
        for block, ask, hear in zip(self._blocks, self._ask, self._hear, strict=True):
            x = block.attend(x, self._attention, rotary)
            queries = (block.norm(x) @ ask.T).view(len(x), HEADS.num_heads, HEADS.head_dim)
            x = block.think(x + self._cross.attend(queries) @ hear.T)
        last = x[given["giving"]] if "giving" in given else x
        logits = last @ self._head.T
        return answer(prepared, {"token": logits.argmax(-1), "logits": logits})

    def capture_configs(self) -> Sequence[CaptureConfig]:
        shapes = Shapes(rows=(1, 2, 4))
        return (CaptureConfig("decode", shapes, key=_ALL_GIVE, caps_eager_batch_size=False),)

    def capture_key(self, walk: str, rows: Sequence[StepRow]) -> Hashable:
        giving = all(row.span == 1 and _state(row).gives_token(1) for row in rows)
        return _ALL_GIVE if giving else None

    def static_inputs(self, walk: str, rows: int, tokens: int, key: Hashable) -> dict[str, Tensor]:
        zeros = torch.zeros(tokens, dtype=torch.int64)
        return {"token_ids": zeros, "positions": zeros.clone()}

    def check_stop(self, row: StepRow, outputs: HostRow) -> frozenset[str]:
        _state(row).accept(outputs)
        return frozenset()


def _state(row: StepRow) -> TranslateRequest:
    assert isinstance(row.info.state, TranslateRequest)
    return row.info.state


def encoder_decoder_parts(num_pages: int, host_pages: int = 0, seed: int = 0) -> ModelParts:
    """Both nodes; the decoder's own cache and the one of contexts have so many pages each."""
    decoder, both = frozenset({DECODER}), frozenset({ENCODER, DECODER})
    config = kv_config(NUM_LAYERS, num_pages, host_pages)
    return ModelParts(
        {ENCODER: Encoder(seed), DECODER: Decoder(seed + 1)},
        (
            RaggedAttentionSpec("ragged", frozenset({ENCODER})),
            KVSpec("context", both, config),
            CrossAttentionSpec("cross", both, "context", TorchOperators()),
            KVSpec("kv", decoder, config),
            AttentionSpec("attention", decoder, "kv", TorchOperators()),
            PositionSpec("positions", decoder),
        ),
    )
