"""A tiny random decoder on the real resources: paged cache, attention, positions and sampler."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.device import create_backend
from phalanx.device.operators.base import HeadLayout, Operators
from phalanx.step.declaration import Segment, SubmoduleStep
from phalanx.step.engine import StepEngine
from phalanx.step.graphs.capture_config import CaptureConfig
from phalanx.step.graphs.shapes import Shapes
from phalanx.step.outputs import Column, HostRow, NodeOutputs
from phalanx.step.resources.attention import AttentionSpec, AttentionStep, PagedAttention
from phalanx.step.resources.base import Resource
from phalanx.step.resources.kv_cache import KVConfig, KVSpec, KVStep
from phalanx.step.resources.positions import PositionSpec, PositionStep
from phalanx.step.resources.sampler import Sampler, SamplerSpec, SamplerStep
from phalanx.step.submodule import EngineInputs, NodeSubmodule, StepRow
from phalanx.testing.token_request import NODE, WALK, RowTokens, TokenRequest

VOCAB_SIZE = 61
NUM_LAYERS = 2
HEADS = HeadLayout(num_heads=4, num_kv_heads=2, head_dim=8)
WIDTH = HEADS.num_heads * HEADS.head_dim
_EPS = 1e-6


class ToyWeights:
    """Fixed random weights, float32; the same on every device."""

    def __init__(self, seed: int = 0, device: torch.device | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        qkv_rows = (HEADS.num_heads + 2 * HEADS.num_kv_heads) * HEADS.head_dim

        def random(*shape: int) -> Tensor:
            drawn = torch.randn(shape, generator=generator).div_(math.sqrt(shape[-1]))
            return drawn.to(device)

        self.embedding = random(VOCAB_SIZE, WIDTH).mul_(math.sqrt(WIDTH))
        self.qkv = [random(qkv_rows, WIDTH) for _ in range(NUM_LAYERS)]
        self.output = [random(WIDTH, WIDTH) for _ in range(NUM_LAYERS)]
        self.norm = torch.ones(WIDTH, device=device)
        self.head = random(VOCAB_SIZE, WIDTH)


def rotary_tables(positions: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin) of int64 positions [T], each float32 [T, head_dim / 2]."""
    half = HEADS.head_dim // 2
    places = torch.arange(half, dtype=torch.float32, device=positions.device)
    frequencies = 100.0 ** (-places / half)
    angles = positions.float()[:, None] * frequencies
    return angles.cos(), angles.sin()


TOY_CAPTURES = tuple(
    CaptureConfig(WALK, shapes, key=key)
    for key in ("greedy", "drawn")
    for shapes in (Shapes(rows=(1, 4)), Shapes(rows=(4,), token_buckets=(4, 16)))
)
"""One token a row, and rows of any lengths."""


@dataclass(frozen=True)
class _Prepared:
    inputs: Mapping[str, Tensor]
    giving: tuple[str, ...]


class ToyDecoder(NodeSubmodule):
    """See the module. A row's state is a `TokenRequest` with a sampler's settings; beside its token
    each row gives `logits`, float32 [vocabulary].
    """

    speculates = True

    def __init__(
        self,
        operators: Operators,
        weights: ToyWeights,
        *,
        batched: bool = True,
        captures: Sequence[CaptureConfig] = (),
    ) -> None:
        super().__init__()
        self.num_forwards = 0
        self._captures = captures
        self._operators = operators
        self._weights = weights
        self._device = weights.norm.device
        self._batched = batched
        self._attention: PagedAttention
        self._sampler: Sampler

    def bind_node_resources(self, resources: Mapping[str, Resource]) -> None:
        attention, sampler = resources["attention"], resources["sampler"]
        assert isinstance(attention, PagedAttention)
        assert isinstance(sampler, Sampler)
        self._attention, self._sampler = attention, sampler

    def prepare_inputs(self, walk: str, row: StepRow) -> RowTokens:
        return _state(row).take(row.span, row.ahead)

    def thread_outputs(
        self,
        walk: str,
        rows: Sequence[StepRow],
        inputs: Sequence[Any],
        before: Sequence[NodeOutputs],
    ) -> Sequence[Any]:
        return RowTokens.threaded([row.request_id for row in rows], inputs, before)

    def can_batch(self, walk: str, rows: Sequence[StepRow], inputs: Sequence[Any]) -> bool:
        return self._batched

    def capture_configs(self) -> Sequence[CaptureConfig]:
        return self._captures

    def capture_key(self, walk: str, rows: Sequence[StepRow]) -> str:
        return "greedy" if all(_state(row).greedy for row in rows) else "drawn"

    def static_inputs(self, walk: str, rows: int, tokens: int, key: Hashable) -> dict[str, Tensor]:
        def zeros(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int64, device=self._device)

        return {"token_ids": zeros(tokens), "positions": zeros(tokens), "last": zeros(rows)}

    def declare_capture(self, walk: str, key: Hashable) -> SubmoduleStep:
        return self._declared((), (), key)

    def declare_step(
        self, walk: str, rows: Sequence[StepRow], inputs: Sequence[Any]
    ) -> SubmoduleStep:
        segments = tuple(Segment(row.request_id, row.span) for row in rows)
        return self._declared(segments, _giving(rows, inputs), self.capture_key(walk, rows))

    def _declared(
        self, segments: tuple[Segment, ...], giving: tuple[str, ...], key: Hashable
    ) -> SubmoduleStep:
        return SubmoduleStep(
            segments,
            {
                "kv": KVStep(segments),
                "attention": AttentionStep(),
                "positions": PositionStep(segments),
                "sampler": SamplerStep(giving, greedy_only=key == "greedy"),
            },
            key,
            {"token": giving, "logits": giving},
        )

    def preprocess(
        self, engine: EngineInputs, inputs: Sequence[Any]
    ) -> _Prepared | Mapping[str, Tensor]:
        captured = engine.lease is not None
        last: list[int] = []
        at = 0
        for row, given in zip(engine.rows, inputs, strict=True):
            at += row.span
            if captured or given.gives:
                last.append(at - 1)
        tensors = {
            "token_ids": torch.cat([given.tensor().to(self._device) for given in inputs]),
            "positions": engine.plans["positions"],
            "last": torch.tensor(last, dtype=torch.int64, device=self._device),
        }
        return tensors if captured else _Prepared(tensors, _giving(engine.rows, inputs))

    def forward(self, prepared: _Prepared | Mapping[str, Tensor]) -> NodeOutputs:
        self.num_forwards += 1
        if isinstance(prepared, _Prepared):
            if not prepared.giving:
                self._hidden(prepared.inputs)
                return NodeOutputs()
            computed = self._computed(prepared.inputs)
            return NodeOutputs(
                {name: Column(prepared.giving, values) for name, values in computed.items()}
            )
        computed = self._computed(prepared)
        return NodeOutputs({name: Column.by_row(one) for name, one in computed.items()})

    def _computed(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        hidden = self._hidden(inputs)[inputs["last"]]
        logits = self._operators.rms_norm(hidden, self._weights.norm, _EPS) @ self._weights.head.T
        return {"token": self._sampler.sample(logits), "logits": logits}

    def _hidden(self, inputs: Mapping[str, Tensor]) -> Tensor:
        weights, rotary = self._weights, rotary_tables(inputs["positions"])
        x = weights.embedding[inputs["token_ids"]]
        for qkv, output in zip(weights.qkv, weights.output, strict=True):
            normed = self._operators.rms_norm(x, weights.norm, _EPS)
            x = x + self._attention.attend(normed @ qkv.T, HEADS, rotary) @ output.T
        return x

    def check_stop(self, row: StepRow, outputs: HostRow) -> frozenset[str]:
        _state(row).accept(outputs)
        return frozenset()


def _state(row: StepRow) -> TokenRequest:
    assert isinstance(row.info.state, TokenRequest)
    return row.info.state


def _giving(rows: Sequence[StepRow], inputs: Sequence[RowTokens]) -> tuple[str, ...]:
    return tuple(row.request_id for row, given in zip(rows, inputs, strict=True) if given.gives)


def toy_decoder_engine(
    operators: Operators,
    num_pages: int,
    page_size: int,
    *,
    batched: bool = True,
    seed: int = 0,
    capture: str = "off",
    target: str = "cpu",
) -> StepEngine:
    """An engine of one `ToyDecoder`; with a `capture` it is warm, and sequences are short."""
    nodes = frozenset({NODE})
    config = KVConfig(
        num_layers=NUM_LAYERS,
        num_kv_heads=HEADS.num_kv_heads,
        head_dim=HEADS.head_dim,
        num_pages=num_pages,
        page_size=page_size,
        max_seq_len=4096 if capture == "off" else 64,
        dtype=torch.float32,
    )
    engine = StepEngine(create_backend(target, capture=capture))
    weights = ToyWeights(seed, engine.backend.device)
    node = ToyDecoder(operators, weights, batched=batched, captures=TOY_CAPTURES)
    engine.load_model(
        {NODE: node},
        [
            KVSpec("kv", nodes, config),
            AttentionSpec("attention", nodes, "kv", operators),
            PositionSpec("positions", nodes),
            SamplerSpec("sampler", nodes, VOCAB_SIZE),
        ],
    )
    engine.warm_up()
    return engine
