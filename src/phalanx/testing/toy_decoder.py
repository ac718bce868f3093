"""A tiny random decoder on the real resources: paged cache, attention, positions and sampler."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.device.cpu import CpuBackend
from phalanx.device.operators.base import HeadLayout, Operators
from phalanx.step.declaration import Segment, SubmoduleStep
from phalanx.step.engine import StepEngine
from phalanx.step.outputs import Column, HostRow, NodeOutputs
from phalanx.step.resources.attention import AttentionSpec, AttentionStep, PagedAttention
from phalanx.step.resources.base import Resource
from phalanx.step.resources.kv_cache import KVConfig, KVSpec, KVStep
from phalanx.step.resources.positions import PositionSpec, PositionStep
from phalanx.step.resources.sampler import Sampler, SamplerSpec, SamplerStep
from phalanx.step.submodule import EngineInputs, NodeSubmodule, StepRow
from phalanx.testing.token_request import NODE, RowTokens, TokenRequest

VOCAB_SIZE = 61
NUM_LAYERS = 2
HEADS = HeadLayout(num_heads=4, num_kv_heads=2, head_dim=8)
WIDTH = HEADS.num_heads * HEADS.head_dim
_EPS = 1e-6


class ToyWeights:
    """Fixed random weights, float32."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        qkv_rows = (HEADS.num_heads + 2 * HEADS.num_kv_heads) * HEADS.head_dim

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).div_(math.sqrt(shape[-1]))

        self.embedding = random(VOCAB_SIZE, WIDTH).mul_(math.sqrt(WIDTH))
        self.qkv = [random(qkv_rows, WIDTH) for _ in range(NUM_LAYERS)]
        self.output = [random(WIDTH, WIDTH) for _ in range(NUM_LAYERS)]
        self.norm = torch.ones(WIDTH)
        self.head = random(VOCAB_SIZE, WIDTH)


def rotary_tables(positions: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin) of int64 positions [T], each float32 [T, head_dim / 2]."""
    half = HEADS.head_dim // 2
    frequencies = 100.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = positions.float()[:, None] * frequencies
    return angles.cos(), angles.sin()


@dataclass(frozen=True)
class _Prepared:
    token_ids: Tensor
    positions: Tensor
    giving: tuple[str, ...]
    giving_at: Tensor


class ToyDecoder(NodeSubmodule):
    """See the module. A row's state is a `TokenRequest` with a sampler's settings; beside its token
    each row gives `logits`, float32 [vocabulary].
    """

    speculates = True

    def __init__(self, operators: Operators, weights: ToyWeights, *, batched: bool = True) -> None:
        super().__init__()
        self._operators = operators
        self._weights = weights
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

    def declare_step(
        self, walk: str, rows: Sequence[StepRow], inputs: Sequence[Any]
    ) -> SubmoduleStep:
        segments = tuple(Segment(row.request_id, row.span) for row in rows)
        return SubmoduleStep(
            segments,
            {
                "kv": KVStep(segments),
                "attention": AttentionStep(),
                "positions": PositionStep(segments),
                "sampler": SamplerStep(_giving(rows, inputs)),
            },
        )

    def preprocess(self, engine: EngineInputs, inputs: Sequence[Any]) -> _Prepared:
        ends: list[int] = []
        at = 0
        for row, given in zip(engine.rows, inputs, strict=True):
            at += row.span
            if given.gives:
                ends.append(at - 1)
        return _Prepared(
            torch.cat([given.tensor() for given in inputs]),
            engine.plans["positions"],
            _giving(engine.rows, inputs),
            torch.tensor(ends, dtype=torch.int64),
        )

    def forward(self, prepared: _Prepared) -> NodeOutputs:
        weights, rotary = self._weights, rotary_tables(prepared.positions)
        x = weights.embedding[prepared.token_ids]
        for qkv, output in zip(weights.qkv, weights.output, strict=True):
            normed = self._operators.rms_norm(x, weights.norm, _EPS)
            x = x + self._attention.attend(normed @ qkv.T, HEADS, rotary) @ output.T
        if not prepared.giving:
            return NodeOutputs()
        last = self._operators.rms_norm(x[prepared.giving_at], weights.norm, _EPS)
        logits = last @ weights.head.T
        tokens = self._sampler.sample(logits)
        return NodeOutputs(
            {"token": Column(prepared.giving, tokens), "logits": Column(prepared.giving, logits)}
        )

    def check_stop(self, row: StepRow, outputs: HostRow) -> frozenset[str]:
        _state(row).accept(outputs)
        return frozenset()


def _state(row: StepRow) -> TokenRequest:
    assert isinstance(row.info.state, TokenRequest)
    return row.info.state


def _giving(rows: Sequence[StepRow], inputs: Sequence[RowTokens]) -> tuple[str, ...]:
    return tuple(row.request_id for row, given in zip(rows, inputs, strict=True) if given.gives)


def toy_decoder_engine(
    operators: Operators, num_pages: int, page_size: int, *, batched: bool = True, seed: int = 0
) -> StepEngine:
    """An engine of one `ToyDecoder` on the CPU."""
    nodes = frozenset({NODE})
    config = KVConfig(
        num_layers=NUM_LAYERS,
        num_kv_heads=HEADS.num_kv_heads,
        head_dim=HEADS.head_dim,
        num_pages=num_pages,
        page_size=page_size,
        max_seq_len=4096,
        dtype=torch.float32,
    )
    engine = StepEngine(CpuBackend())
    engine.load_model(
        {NODE: ToyDecoder(operators, ToyWeights(seed), batched=batched)},
        [
            KVSpec("kv", nodes, config),
            AttentionSpec("attention", nodes, "kv", operators),
            PositionSpec("positions", nodes),
            SamplerSpec("sampler", nodes, VOCAB_SIZE),
        ],
    )
    return engine
